"""What a job's ranks know at its end, put together: the outcome of a run.

The ranks of a built-in workload gather it, or write their own parts; those of a user's job, which
`job_observer.py` observes, write their parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

ENVIRONMENT_VARIABLE: Final = "DDLTRACE_EXPERIMENT_OBSERVE"
"""Holds the arguments of `job_observer.JobObserver` as JSON; without it, a rank is not observed."""


def environment(outcome: Path, *, warmup: int, steps: int) -> dict[str, str]:
    """The variable that lets the ranks of a user's job be observed.

    Args:
        outcome: The outcome's file, beside which each rank writes its part.
        warmup: Steps before bytes are counted.
        steps: Number of steps after which the job ends.
    """
    value = {"outcome": str(outcome.resolve()), "warmup": warmup, "steps": steps}
    return {ENVIRONMENT_VARIABLE: json.dumps(value)}


def part_path(outcome: Path, rank: int) -> Path:
    """Where a rank writes its own part, if ranks do not gather them."""
    return outcome.with_name(f"{outcome.name}.rank-{rank:05d}")


def started_path(outcome: Path) -> Path:
    """Exists from when a rank's death is no longer the end of the job."""
    return outcome.with_name(f"{outcome.name}.started")


def remove(outcome: Path) -> None:
    """Removes what the ranks of an earlier run wrote."""
    for path in (outcome, started_path(outcome), *_parts(outcome)):
        path.unlink(missing_ok=True)


def read(outcome: Path) -> dict[str, Any] | None:
    """The outcome that rank 0 wrote, or that the ranks wrote in parts; None if none did."""
    if outcome.is_file():
        value: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
        return value
    parts = []
    for path in _parts(outcome):
        with contextlib.suppress(OSError, ValueError):
            parts.append(json.loads(path.read_text(encoding="utf-8")))
    return merged(parts) if parts else None


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One outcome from the parts of all ranks, or of those that have not died.

    Args:
        parts: ``losses`` (None where a rank does not know one; empty if it cannot tell),
            ``wire_bytes``, ``digest`` (None if the rank has a part of the model, or it is not
            known), ``peak_memory`` and ``notes`` of each rank; the first one's other entries are
            those of the outcome.
    """
    digests = {part["digest"] for part in parts}
    peaks = [part["peak_memory"] for part in parts if part["peak_memory"] is not None]
    steps = [part["losses"] for part in parts]
    own = {"losses", "wire_bytes", "digest", "peak_memory"}
    return {
        **{key: value for key, value in parts[0].items() if key not in own},
        "losses": [
            _mean([loss for loss in step if loss is not None]) for step in zip_longest(*steps)
        ]
        if all(steps)
        else [],
        "wire_bytes_per_step": [part["wire_bytes"] for part in parts],
        **({"peak_memory_bytes": peaks} if peaks else {}),
        "notes": list(dict.fromkeys(note for part in parts for note in part["notes"])),
        "replicas_identical": None if None in digests else len(digests) == 1,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _parts(outcome: Path) -> list[Path]:
    return sorted(outcome.parent.glob(f"{outcome.name}.rank-*"))
