"""From the hot path to disk: the buffer, the batches, the writer thread."""
