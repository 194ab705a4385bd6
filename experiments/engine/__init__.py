"""Executes a strategy in a real job."""
