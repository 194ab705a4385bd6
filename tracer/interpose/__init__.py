"""Every patch of other people's code, one file per thing patched.

A patch calls the original exactly once, with the arguments it was given, and lets its result and
its exceptions through. If the tracer's own code around that call fails, the failure is noted and
the job goes on.
"""
