"""Findings: possible improvements, found in the measures of a trace."""
