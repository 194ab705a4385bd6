"""ByteDance's StragglerAnalysis: its trace format, and how its operations depend on each other."""
