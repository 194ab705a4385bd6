"""The exchanges of encoded tensors: which collectives run between encoding and decoding."""
