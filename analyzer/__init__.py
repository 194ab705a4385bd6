"""Analysis: a trace opened, aligned, joined across ranks, measured and reported."""
