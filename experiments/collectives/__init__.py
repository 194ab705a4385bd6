"""Collectives between ranks: the library's own, or plans of architectures by send and receive."""
