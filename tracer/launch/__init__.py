"""Starts the job, watches its ranks end, and completes the trace; checks what can be captured."""
