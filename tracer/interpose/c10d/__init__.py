"""Collectives, sends and receives: how the tracer observes, times and numbers them."""
