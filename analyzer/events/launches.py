"""Maps device work to the host calls that launched it.

A trace contains the launch time of device work (`enqueue_ns`), which is the start of the runtime
call that launched it. The call is identified by this start and by its name.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    Columns,
    IntArray,
    named,
)

_RUNTIME_CALL: Final = re.compile(r"(?:cuda|cu|hip|musa|xpu|ur)[A-Z]\w*$")
_PYTHON_CALL: Final = re.compile(r".*\.py\(\d+\): |<built-in |nn\.Module: ")
_COPIES: Final = re.compile(r"\w*Mem(?:cpy|set)")
_LAUNCHES: Final = re.compile(r"\w*Launch")


def is_runtime_call(name: str) -> bool:
    """Whether a host event is a call of the device's runtime or driver, as cudaLaunchKernel."""
    return _RUNTIME_CALL.match(name) is not None


def is_python_call(name: str) -> bool:
    """Whether a host event is a Python function that the profiler recorded (``with_stack``)."""
    return _PYTHON_CALL.match(name) is not None


def launches_of(columns: Columns) -> IntArray:
    """For each event the row of the runtime call that launched it; -1 if no call is known.

    One call may launch several kernels (a CUDA graph). Of several calls that start in the same
    nanosecond, one whose name fits is taken: a call that copies for a copy, else a call that
    launches.
    """
    launch = np.full(len(columns), NULL, dtype=np.int64)
    host = columns.kind == KIND["host"]
    calls = np.flatnonzero(named(columns, is_runtime_call) & host)
    enqueued = columns.ints("enqueue_ns", null=NULL_NS)
    is_copy = columns.kind == KIND["copy"]
    on_device = is_copy | np.isin(columns.kind, [KIND["kernel"], KIND["message"]])
    works = np.flatnonzero(on_device & (enqueued != NULL_NS))
    copying = named(columns, _COPIES.match)
    launching = named(columns, _LAUNCHES.match)
    for its_works, its_calls in (
        (works[is_copy[works]], calls[copying[calls]]),
        (works, calls[launching[calls]]),
        (works, calls),
    ):
        missing = its_works[launch[its_works] == NULL]
        launch[missing] = _match(enqueued[missing], columns.start, its_calls)
    return launch


def _match(times: IntArray, start: IntArray, calls: IntArray) -> IntArray:
    """For each time the call that starts then, the n-th work with that time to the n-th call."""
    found = np.full(len(times), NULL, dtype=np.int64)
    if not len(times) or not len(calls):
        return found
    calls = calls[np.argsort(start[calls], kind="stable")]
    starts = start[calls]
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    first = np.searchsorted(starts, ordered, side="left")
    last = np.searchsorted(starts, ordered, side="right") - 1
    nth = np.arange(len(ordered)) - np.searchsorted(ordered, ordered, side="left")
    place = np.minimum(first + nth, last)
    known = last >= first
    found[order[known]] = calls[place[known]]
    return found
