"""Idle time of a stream by cause, and the length of its queue, as HTA 0.5.0 defines them.

HTA sorts events that begin at the same time with NumPy's default sort, which is not stable. This
module sorts the same columns in the same way, so that it finds the same order on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import BoolArray, IntArray, places_by_value

LAUNCHES: Final = frozenset(
    {
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "runFunction - job_prep_and_submit_for_execution",
        "hipLaunchKernel",
        "hipExtModuleLaunchKernel",
        "hipMemcpyAsync",
        "hipMemsetAsync",
        "hipMemcpyWithStream",
    }
)
"""The calls that HTA counts as launches in its queues."""

KERNEL_WAIT_US: Final = 30

HTA_FIRST_LABEL: Final = "hta_first_events"
"""The entry of a run's labels with the ranks whose file begins with an interval.

For HTA, work without a recorded launch was launched then.
"""

Times = npt.NDArray[Any]
"""Integers or floats, of any unit."""


class Gaps(NamedTuple):
    """Idle time between the works of a stream, in the unit of their times.

    Attributes:
        host: Before works that were launched after the end of the work before.
        kernel: Other gaps shorter than `KERNEL_WAIT_US`.
        other: All other gaps.
    """

    host: float
    kernel: float
    other: float


def stream_gaps(
    start: Times, end: Times, launched: Times, is_known: BoolArray, short: float
) -> Gaps:
    """Splits the idle time of a stream.

    Args:
        start: Start of each work on the stream, in the order of the file.
        end: End of each.
        launched: Start of the call that launched each.
        is_known: Whether `launched` is known.
        short: `KERNEL_WAIT_US` in the unit of the times.
    """
    order = np.argsort(start)
    begin, former = start[order][1:], end[order][:-1]
    gap = begin - former
    host = is_known[order][1:] & (launched[order][1:] > former)
    kernel = ~host & (gap < short)
    sums = (math.fsum(gap[which].tolist()) for which in (host, kernel, ~host & ~kernel))
    return Gaps(*sums)


def queue_lengths(
    launched: Times, launched_on: IntArray, start: Times, stream: IntArray
) -> Iterator[tuple[int, tuple[Times, IntArray]]]:
    """The number of works that are launched and not begun, after each of its changes.

    Args:
        launched: When each work of a rank was launched, in the order of the calls in the file.
        launched_on: The stream of each of these works.
        start: Start of each of these works, in the order of the works in the file.
        stream: Their streams.

    Yields:
        Each stream, ascending, with times and lengths.
    """
    times = np.concatenate([launched, start])
    order = np.argsort(times)
    change = np.repeat([1, -1], [len(launched), len(start)])[order]
    on = np.concatenate([launched_on, stream])[order]
    times = times[order]
    for number, mine in places_by_value(on):
        yield number, (times[mine], np.cumsum(change[mine]))
