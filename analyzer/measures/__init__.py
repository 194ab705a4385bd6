"""Measures: each module turns scans and joined messages into one kind of rows."""
