"""SQL over a trace, and the tables that it reads."""
