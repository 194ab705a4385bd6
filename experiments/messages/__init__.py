"""The messages of one step: their plan, their exchange, and their names in the trace."""
