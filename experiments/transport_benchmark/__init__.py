"""``ddltrace experiment transports``: time and processor time of message libraries against size."""
