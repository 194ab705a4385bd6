"""Requests and reads the files that the ranks of an observed job write."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

ENVIRONMENT_VARIABLE: Final = "DDLTRACE_EXPERIMENT_OBSERVE"
"""Holds the arguments of `job_observer.JobObserver` as JSON; without it, a rank is not observed."""


def environment(prefix: Path, *, warmup: int, steps: int) -> dict[str, str]:
    """The variable that lets the ranks of a job be observed.

    Args:
        prefix: Path prefix of the files; each rank appends its number.
        warmup: Steps before bytes are counted.
        steps: Number of steps after which the job ends.
    """
    value = {"prefix": str(prefix.resolve()), "warmup": warmup, "steps": steps}
    return {ENVIRONMENT_VARIABLE: json.dumps(value)}


def rank_path(prefix: Path, rank: int) -> Path:
    """The file of one rank."""
    return prefix.with_name(f"{prefix.name}.rank-{rank:05d}.json")


def remove_ranks(prefix: Path) -> None:
    """Removes the files of an earlier run."""
    for path in _written(prefix):
        path.unlink()


def read_ranks(prefix: Path) -> dict[str, Any]:
    """Reads the files of a job's ranks as an outcome, see `measurement.measure`.

    Args:
        prefix: As given to `environment`.
    """
    ranks = []
    for path in _written(prefix):
        with contextlib.suppress(OSError, ValueError):
            ranks.append(json.loads(path.read_text(encoding="utf-8")))
    if not ranks:
        return {}
    losses = [sum(step) / len(ranks) for step in zip(*(r["losses"] for r in ranks), strict=False)]
    outcome: dict[str, Any] = {
        "losses": losses,
        "wire_bytes_per_step": [rank["wire_bytes_per_step"] for rank in ranks],
        "notes": list(dict.fromkeys(note for rank in ranks for note in rank.get("notes", []))),
    }
    outcome["choices"] = ranks[0].get("choices", {})
    peaks = [rank["peak_memory_bytes"] for rank in ranks if rank["peak_memory_bytes"] is not None]
    return outcome | ({"peak_memory_bytes": peaks} if peaks else {})


def _written(prefix: Path) -> list[Path]:
    return sorted(prefix.parent.glob(f"{prefix.name}.rank-*.json"))
