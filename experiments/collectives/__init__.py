"""Collectives between ranks: those of the library, or plans of architectures by send and
receive."""
