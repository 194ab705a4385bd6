"""Runs strategies, measures their traces, keeps and prints results."""
