"""Analyzes long traces in ranges of steps, and merges the results."""
