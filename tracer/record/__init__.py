"""Writes recorded events to disk: the event buffer, the Arrow batches, the writer thread."""
