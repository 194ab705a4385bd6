"""Validates the metadata of a run before the analysis uses it.

``run.json`` is untrusted and may be damaged. The reader has checked its structure; this module
checks the type of every value that the analysis uses, and bounds within which no arithmetic
overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo

_MAX_RANK: Final = 1 << 24
_MAX_COUNT: Final = 1 << 53
_MAX_ID: Final = (1 << 31) - 1


def check_run(run: RunInfo) -> RunInfo:
    """Checks a run and returns it unchanged.

    Raises:
        TraceError: It holds something that no tracer writes; says what.
    """
    for name, fits in _OF_RUN.items():
        _check(fits(getattr(run, name)), name, getattr(run, name))
    segments = set()
    seen: set[int] = set()
    for info in run.ranks:
        _check_rank(info)
        for group in info.groups:
            # Many ranks share one object: to check it for each would be quadratic in the ranks.
            if id(group.ranks) not in seen:
                seen.add(id(group.ranks))
                _check(all(0 <= r <= _MAX_RANK for r in group.ranks), "group", group.ranks[:8])
        _check(info.segment not in segments, "segment", info.segment)
        segments.add(info.segment)
    return run


def _check_rank(info: RankInfo) -> None:
    for name, fits in _OF_RANK.items():
        value = getattr(info, name)
        _check(fits(value), f"rank {info.rank}: {name}", value)
    for tensor in info.tensors:
        _check(0 <= tensor.id <= _MAX_ID, "tensor id", tensor.id)
        sizes = tensor.shape
        _check(all(0 <= size <= _MAX_COUNT for size in sizes), "tensor shape", sizes[:8])
        _check(0 <= tensor.bytes <= _MAX_COUNT, "tensor bytes", tensor.bytes)


def _check(fits: bool, name: str, value: Any) -> None:
    if not fits:
        raise TraceError(f"run.json is damaged: {name:.60} is {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer of more digits than Python writes
        return "a number too large to write"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_record(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_RANK


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_time(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 62


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number within the bounds of time arithmetic."""
    if type(value) is int:
        return abs(value) < 1 << 62
    return isinstance(value, float) and math.isfinite(value) and abs(value) < 1 << 62


_OF_RUN: Final[dict[str, Callable[[Any], bool]]] = {
    "status": _is_text,
    "level": _is_text,
    "source": _is_text,
    "ended_unix_ns": _optional(_is_time),
}
_OF_RANK: Final[dict[str, Callable[[Any], bool]]] = {
    "rank": _is_rank,
    "world_size": _is_rank,
    "attempt": _is_count,
    "pid": _optional(_is_count),
    "host": _is_text,
    "clock_domain": _is_text,
    "status": _is_text,
    "level": _is_text,
    "versions": _is_record,
    "events": _optional(_is_count),
    "ended_ns": _optional(_is_time),
    "exit_status": _optional(_is_count),
    "dropped": _is_count,
    "lost_bytes": _is_count,
}
