"""Numbers, names and tables as text."""
