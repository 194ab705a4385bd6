"""Codecs: what travels in place of a gradient, and how it is encoded and decoded."""
