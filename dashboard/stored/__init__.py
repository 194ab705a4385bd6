"""The timeline and the analysis of a large trace, stored so that they load at once."""
