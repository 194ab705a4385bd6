"""Exchanges of encoded tensors: the collectives between encoding and decoding."""
