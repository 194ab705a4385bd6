"""Reads resource counters of the process, its host and its device."""
