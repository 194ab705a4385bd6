"""The names of an experiment's files."""

from __future__ import annotations

from typing import Final

RESULTS_FILE: Final = "results.json"
ARROW_FILE: Final = "results.arrow"
