"""Starts a job, watches its ranks, and finalizes the trace; checks what can be recorded."""
