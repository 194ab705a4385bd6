"""Follows a job while it runs: reads only what its ranks have written since the last look."""
