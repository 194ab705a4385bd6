"""How short a step can be at least, by the processor time that the ranks of a host need for it.

A fault of one rank, such as a sleep, also gives the other ranks of its host the processors to
themselves. Without the fault all of them compute at the same time. Where they have fewer processors
than they need, a replay that only moves the late rank's work is too short. A step of ``T`` us on a
host with ``P`` processors, whose ranks use ``c_r`` us of processor time in a step, cannot take less
than

    T_least(k) = (sum_r c_r - s_k) / P

if rank ``k`` were as the others: its surplus ``s_k`` is the part of ``c_k`` that exceeds the median
of ``c`` of the host's other ranks, because a fault that computes ends with its processor time. So
no more than ``T - max_host T_least(k)`` can be saved. Nothing is concluded where the readings or
the number of processors are missing, as in imported traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import IntArray

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_LEAST_SHARE: Final = 0.5
"""Of the steady steps, how many at least lie between the first and the last reading."""


@dataclass(frozen=True)
class HostUse:
    """The processors of a host in the steady steps.

    Attributes:
        step_us: Time per step, mean over its ranks.
        used_us: Rank -> processor time of its process in a step.
        processors: How many processors the host has.
    """

    step_us: float
    used_us: Mapping[int, float]
    processors: float

    def most_saved_us(self, like_others: Sequence[int]) -> float:
        """Returns what can be saved of a step at most.

        Args:
            like_others: Ranks that use no more processor time than the others, from now on.
        """
        needed = dict(self.used_us)
        for rank in like_others:
            others = [used for other, used in self.used_us.items() if other != rank]
            if rank in needed and others:
                needed[rank] = min(needed[rank], float(np.median(others)))
        return max(self.step_us - sum(needed.values()) / self.processors, 0.0)


def host_uses(trace: Trace, steady: IntArray) -> list[HostUse]:
    """Returns the use of each host whose processors and their use were recorded.

    Args:
        steady: Numbers of the steady steps, ascending.
    """
    # Between two processes of a rank no counters are read.
    ranks = [
        rank for rank in trace.ranks if trace.has_counters(rank) and len(trace.infos(rank)) == 1
    ]
    if not len(steady) or not ranks:
        return []
    task = partial(_read, first=int(steady[0]), last=int(steady[-1]))
    found = trace.map_ranks(task, "reading counters", ranks)
    hosts: dict[str, list[tuple[int, _Readings]]] = {}
    for rank, readings in zip(ranks, found, strict=True):
        hosts.setdefault(trace.infos(rank)[0].host, []).append((rank, readings))
    uses = []
    for members in hosts.values():
        processors = max(readings.processors for _, readings in members)
        known = {rank: one for rank, one in members if one.step_us}
        if processors and known:
            step_us = float(np.mean([one.step_us for one in known.values()]))
            used_us = {rank: one.used_us for rank, one in known.items()}
            uses.append(HostUse(step_us, used_us, processors))
    return uses


def processors_of(trace: Trace, rank: int) -> float:
    """Processors of the host of a rank; 0 if that was not recorded."""
    if not trace.has_counters(rank):
        return 0.0
    return _processors(trace.counters(rank))


@dataclass(frozen=True)
class _Readings:
    """What the counters of a rank say; 0 for what they do not.

    Attributes:
        step_us: Time per step.
        used_us: Processor time of the process per step.
        processors: Processors of the host.
    """

    step_us: float
    used_us: float
    processors: float


def _read(trace: Trace, *, first: int, last: int) -> _Readings:
    """Reads the counters of a trace of one rank, from the end of the step before the first."""
    (rank,) = trace.ranks
    table = trace.counters(rank)
    most = _processors(table)
    table = _of_name(table, "process_cpu_time")
    step = table["step"].fill_null(-1).to_numpy()
    rows = np.flatnonzero((step >= first - 1) & (step <= last) & (step >= 0))
    steps = int(np.ptp(step[rows])) if len(rows) else 0
    if steps < max(_LEAST_SHARE * (last - first + 1), 1):
        return _Readings(0.0, 0.0, most)
    begin, end = rows[0], rows[-1]
    time_ns, used_s = table["time_ns"].to_numpy(), table["value"].to_numpy()
    return _Readings(
        step_us=float(time_ns[end] - time_ns[begin]) / 1e3 / steps,
        used_us=float(used_s[end] - used_s[begin]) * 1e6 / steps,
        processors=most,
    )


def _processors(counters: pa.Table) -> float:
    return float(_of_name(counters, "host_processors")["value"].to_numpy().max(initial=0.0))


def _of_name(table: pa.Table, name: str) -> pa.Table:
    return table.filter(pc.equal(table["name"].cast(pa.string()), name))
