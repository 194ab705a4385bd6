"""Messages: what travels in one step, how its average is found, and how the trace names it."""
