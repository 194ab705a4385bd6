"""Measures latency and bandwidth between all pairs of ranks."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.auto import Links
from ddltrace.experiments.messages.trace_marks import (
    CALIBRATION_BEGINS,
    CALIBRATION_ENDS,
    calibrating,
    mark,
)

_SMALL: Final = 8
_LARGE: Final = 1 << 20
_REPEATS: Final = 5
_MOST_REPEATS: Final = 200
_SECONDS: Final = 0.03
"""How long round trips of one size are repeated, at least `_REPEATS` times."""


def measure_links(group: dist.ProcessGroup) -> Links:
    """Times round trips between each pair of ranks, one pair after the other. Collective.

    The shortest of some round trips counts. Latency and time for each byte follow from a small
    and a large message.

    Args:
        group: The ranks.
    """
    size, own = group.size(), group.rank()
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    mark(CALIBRATION_BEGINS)
    with calibrating("links between ranks"):
        for first in range(size):
            for second in range(first + 1, size):
                dist.barrier(group=group)
                if own in (first, second):
                    peer = second if own == first else first
                    small, large = (
                        _one_way_us(length, peer, group, leads=own == first)
                        for length in (_SMALL, _LARGE)
                    )
                    measured[first, second] = (small, max(large - small, 1e-3) / (_LARGE - _SMALL))
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, measured, group=group)
    mark(CALIBRATION_ENDS)
    alpha = [[0.0] * size for _ in range(size)]
    beta = [[0.0] * size for _ in range(size)]
    # The first rank of a pair measures, so that all ranks use the same numbers.
    for rank, pairs in enumerate(gathered):
        for (first, second), (latency, per_byte) in pairs.items():
            if rank == first:
                alpha[first][second] = alpha[second][first] = latency
                beta[first][second] = beta[second][first] = per_byte
    return Links(alpha, beta)


def _one_way_us(length: int, peer: int, group: dist.ProcessGroup, *, leads: bool) -> float:
    """Half of the shortest round trip of a message of `length` bytes, in microseconds.

    Round trips are repeated for a while, because a busy machine delays short ones the most: links
    inside a host would seem to differ. In each message, the leading rank says whether more follow.
    """
    data = torch.zeros(length, dtype=torch.uint8)
    shortest = math.inf
    begin = time.monotonic()
    for number in range(1, _MOST_REPEATS + 1):
        enough = number >= _REPEATS and time.monotonic() - begin >= _SECONDS
        last = enough or number == _MOST_REPEATS
        start = time.monotonic_ns()
        if leads:
            data[0] = last
            dist.send(data, group=group, group_dst=peer)
            dist.recv(data, group=group, group_src=peer)
        else:
            dist.recv(data, group=group, group_src=peer)
            dist.send(data, group=group, group_dst=peer)
            last = bool(data[0])
        shortest = min(shortest, (time.monotonic_ns() - start) / 2e3)
        if last:
            break
    return shortest
