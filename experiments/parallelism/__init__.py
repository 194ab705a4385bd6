"""Splits of a model or of its training state over ranks, beside data parallelism."""
