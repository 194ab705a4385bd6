"""Readers of other tools' traces: each turns its format into this project's events.

Nothing is imported here: helper processes load what decodes a file and no more.
"""
