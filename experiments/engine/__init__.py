"""Executes strategies in real jobs."""
