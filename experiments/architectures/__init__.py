"""Architectures: which rank sends which elements to which rank, in which round."""
