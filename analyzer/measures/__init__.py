"""Measures: each module computes one kind of rows from scans and joined messages."""
