"""Strategies as pure objects: catalogue, grammar, message plans."""
