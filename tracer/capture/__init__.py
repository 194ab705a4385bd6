"""One recording rank: injection into the process, the session, its steps."""
