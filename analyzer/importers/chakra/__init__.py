"""Execution traces of MLCommons Chakra: the messages of the format, and their reader."""
