"""Experiments that the dashboard starts, with --allow-run only."""
