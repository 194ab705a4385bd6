"""Runs communication strategies in real training jobs and compares them."""
