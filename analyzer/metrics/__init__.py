"""Watches a job while it runs: metrics for Prometheus, and alerts."""
