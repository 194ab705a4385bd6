"""Patches of PyTorch, one module per patched interface.

A patch calls the original exactly once, with its original arguments, and passes its result and its
exceptions on. An error in the tracer's own code around that call is recorded and the job continues.
"""
