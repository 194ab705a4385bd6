"""Clock alignment: maps the times of all ranks to rank 0's clock, with a bound on the error.

Processes of one clock domain read the same monotonic clock and need no correction; the tracer's
first exchange with rank 0 has verified this. For every other clock, exchanges and the messages of
the trace bound the offset (`clock_bounds`), and the line in the middle of these bounds is the
correction (`clock_fit`). Without exchanges, wall clocks that satisfy all bounds are left
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.trace.clock_bounds import (
    MAX_PROCESSES,
    MessageTimes,
    ProcessTimes,
    message_bounds,
    message_times,
)
from ddltrace.analyzer.trace.clock_fit import (
    Bounds,
    Fit,
    fit_broken_line,
    fit_constant,
    fit_line,
    without_contradictions,
)
from ddltrace.tracer.trace.completeness import listed
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo

ReadTimes = Callable[[Sequence[RankInfo]], Iterable[ProcessTimes]]
"""Reads the times of some processes, each on its own clock, in their order."""

SHARED: Final = "shared clock"
EXCHANGED: Final = "exchanges with rank 0"
REFINED: Final = "exchanges with rank 0 and messages"
MESSAGES: Final = "messages"
WALL: Final = "wall clocks"
UNKNOWN: Final = "none"

_LOST: Final = "lost rank 0"

_READING_NS: Final = 1_000
"""Maximum difference of a host's clock between two of its processors."""


@dataclass(frozen=True)
class RankClock:
    """The correction that maps the clock of one rank process to rank 0's clock.

    Attributes:
        rank: Global rank.
        offset_ns: Added to its times at `reference_ns`.
        drift: Change of the offset per nanosecond of its clock (1e-6 is 1 ppm).
        reference_ns: Time on its own clock at which `offset_ns` holds.
        residual_ns: Bound on the remaining error; None if it is unknown.
        method: How the offset was found.
        fit: The offset over time if it is not a straight line.
    """

    rank: int
    offset_ns: int = 0
    drift: float = 0.0
    reference_ns: int = 0
    residual_ns: float | None = 0.0
    method: str = SHARED
    fit: Fit | None = field(default=None, repr=False)

    def apply(self, times: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Times of this process on rank 0's clock: t + offset + drift (t - reference)."""
        if self.fit is not None:
            moved = np.rint(self.fit.relative(times)).astype(np.int64)
            return np.asarray(times + np.int64(self.fit.base) + moved)
        if self.offset_ns == 0 and self.drift == 0.0:
            return times
        moved = times + np.int64(self.offset_ns)
        if self.drift != 0.0:
            moved += np.rint(self.drift * (times - self.reference_ns)).astype(np.int64)
        return np.asarray(moved)


def align(
    run: RunInfo,
    read: ReadTimes | None = None,
    notes: list[str] | None = None,
) -> dict[str, RankClock]:
    """Finds the clock correction of every rank process.

    Args:
        run: The run, with each rank's clock domain and samples.
        read: Reads the times of processes; called once, and only if there are several clocks.
            Without it, messages are not looked at.
        notes: Receives a note on each clock whose messages contradict each other.

    Returns:
        Segment name -> correction onto the clock of the first rank 0; if the trace lacks rank
        0, of the clock that the others exchanged times with, else of the lowest rank's.
    """
    zeros = {info.attempt: info for info in reversed(run.ranks) if info.rank == 0}
    if not zeros:
        if len({info.clock_domain for info in run.ranks}) < 2:
            return {info.segment: RankClock(info.rank) for info in run.ranks}
        zeros = _in_place_of_rank_0(run.ranks)
    return _Aligner(run, zeros, read, [] if notes is None else notes).clocks()


def _in_place_of_rank_0(infos: Sequence[RankInfo]) -> dict[int, RankInfo]:
    """Attempt -> the process that serves as reference if rank 0 left no trace."""
    if not any(info.clock.get("samples") for info in infos):
        lowest = min(info.rank for info in infos)
        return {info.attempt: info for info in reversed(infos) if info.rank == lowest}
    attempts = {info.attempt for info in infos}
    return {
        n: RankInfo(0, _LOST, attempt=n, clock_domain=f"{_LOST}, attempt {n}") for n in attempts
    }


class _Aligner:
    """Goes from rank 0's clock to all that have exchanged times with it, and on from those."""

    def __init__(
        self,
        run: RunInfo,
        zeros: dict[int, RankInfo],
        read: ReadTimes | None,
        notes: list[str],
    ) -> None:
        self._infos = run.ranks
        self._zeros = zeros
        self._zero = zeros[min(zeros)]
        self._read = read
        self._notes = notes
        self._samples = {info.segment: _samples(info.clock.get("samples")) for info in run.ranks}
        self._domain = {info.segment: info.clock_domain for info in [*zeros.values(), *run.ranks]}
        self._split_off_contradictions()
        self._times: dict[str, MessageTimes | None] = {}
        self._found: dict[str, RankClock] = {}

    def clocks(self) -> dict[str, RankClock]:
        """The correction of every process."""
        home = self._domain[self._zero.segment]
        self._found[home] = RankClock(0)
        waiting = list(dict.fromkeys(self._domain.values()))
        waiting.remove(home)
        # A restart may have moved rank 0 to another host: its clock is found first, then
        # those of the ranks that exchanged times with it there.
        progress = True
        while waiting and progress:
            progress = False
            for domain in list(waiting):
                clock = self._from_exchanges(domain)
                if clock is not None:
                    self._found[domain] = clock
                    waiting.remove(domain)
                    progress = True
        recorded = {self._domain[info.segment] for info in self._infos}
        for domain in recorded.intersection(waiting):
            self._found[domain] = self._without_exchanges(domain)
        return {
            info.segment: replace(self._found[self._domain[info.segment]], rank=info.rank)
            for info in self._infos
        }

    def _split_off_contradictions(self) -> None:
        """Gives a process a clock of its own if its exchanges contradict those it claims to share.

        Hosts started from one snapshot of a virtual machine have the same boot id, and
        different clocks.
        """
        for info in self._infos:
            zero = self._zeros.get(info.attempt, self._zero)
            samples = self._samples[info.segment]
            if not len(samples) or info.rank == 0:
                continue
            if self._domain[info.segment] == self._domain[zero.segment]:
                if not _contains_zero(samples):
                    self._domain[info.segment] += f" process {info.segment}"
                continue
            leader = self._leader(info)
            if leader is not info and not _agrees(samples, self._samples[leader.segment]):
                self._domain[info.segment] += f" process {info.segment}"

    def _leader(self, info: RankInfo) -> RankInfo:
        """The process with most exchanges among those that share a clock."""
        sharing = [
            other
            for other in self._infos
            if other.attempt == info.attempt and other.clock_domain == info.clock_domain
        ]
        return max(sharing, key=lambda other: len(self._samples[other.segment]))

    def _from_exchanges(self, domain: str) -> RankClock | None:
        bounds = self._exchange_bounds(domain)
        if bounds is None:
            return None
        first, last = self._time_range(domain, bounds)
        line = fit_line(bounds, first, last)
        messages = self._message_bounds(domain)
        if messages is not None:
            refined = fit_line(Bounds.joined([bounds, messages.on_base(bounds.base)]), first, last)
            if refined is not None:
                return _straight(refined, REFINED)
        fit = line or fit_broken_line(bounds, first, last)
        if messages is not None:
            fit = replace(fit, residual=max(fit.residual, messages.violation(fit)))
        return _broken(fit, EXCHANGED) if line is None else _straight(fit, EXCHANGED)

    def _without_exchanges(self, domain: str) -> RankClock:
        messages = self._message_bounds(domain)
        info = next(info for info in self._infos if self._domain[info.segment] == domain)
        offset = _wall_offset(info, self._zero)
        if messages is not None:
            fit = self._fit_messages(domain, messages, offset)
            if fit is not None:
                return _straight(fit, MESSAGES)
        if offset is None:
            return RankClock(0, residual_ns=None, method=UNKNOWN)
        return RankClock(0, offset_ns=offset, residual_ns=None, method=WALL)

    def _fit_messages(self, domain: str, bounds: Bounds, wall: int | None) -> Fit | None:
        """Fits a clock to the bounds from its messages.

        Args:
            domain: The clock.
            bounds: The bounds, of which some may come from calls that are not the same message.
            wall: Its offset by the wall clocks, ns, if known; kept where the bounds allow it.

        Returns:
            The fit; None, with a note, if the bounds contradict each other too much.
        """
        first, last = self._time_range(domain, bounds)
        kept = without_contradictions(bounds, first, last)
        ranks = sorted({i.rank for i in self._infos if self._domain[i.segment] == domain})
        if kept is None:
            self._notes.append(
                f"the clock of rank {listed(ranks)} cannot be fitted: its messages contradict each "
                "other and are not used"
            )
            return None
        if len(kept) < len(bounds):
            self._notes.append(
                f"the clock of rank {listed(ranks)}: some of its messages contradict the others: "
                f"{len(bounds) - len(kept)} of {len(bounds)} bounds on it were left out"
            )
        unmoved = None if wall is None else fit_constant(kept, first, last, wall)
        return unmoved or fit_line(kept, first, last)

    def _exchange_bounds(self, domain: str) -> Bounds | None:
        """Bounds on the offset to the first rank 0, by way of the rank 0 of each attempt."""
        parts = []
        for info in self._infos:
            samples = self._samples[info.segment]
            zero = self._zeros.get(info.attempt)
            if not len(samples) or zero is None or info.rank == 0:
                continue
            own, other = self._domain[info.segment], self._domain[zero.segment]
            if own == other:
                continue
            if own == domain and other in self._found:
                parts.append(_continued(samples, self._found[other]))
            elif other == domain and own in self._found:
                parts.append(_continued(_reversed(samples), self._found[own]))
        return Bounds.joined([part.on_base(parts[0].base) for part in parts]) if parts else None

    def _message_bounds(self, domain: str) -> Bounds | None:
        here = self._message_times(domain)
        there = self._message_times(self._domain[self._zero.segment])
        return None if here is None or there is None else message_bounds(here, there)

    def _message_times(self, domain: str) -> MessageTimes | None:
        if self._read is None:
            return None
        if domain not in self._times:
            infos = [info for info in self._infos if self._domain[info.segment] == domain]
            known = self._process_times
            used = [known[info.segment] for info in infos[:MAX_PROCESSES]]
            self._times[domain] = message_times(used)
        return self._times[domain]

    @cached_property
    def _process_times(self) -> Mapping[str, ProcessTimes]:
        """Segment name -> the times of the process, for all whose times may be asked for."""
        assert self._read is not None, "messages are not looked at without a reader"
        home = self._domain[self._zero.segment]
        at_home = [info for info in self._infos if self._domain[info.segment] == home]
        others = [info for info in self._infos if self._domain[info.segment] != home]
        infos = at_home[:MAX_PROCESSES] + others
        found = zip(infos, self._read(infos), strict=True)
        return {info.segment: times for info, times in found}

    def _time_range(self, domain: str, bounds: Bounds) -> tuple[int, int]:
        """The times between which the clock's offset is wanted."""
        first, last = int(bounds.x.min()), int(bounds.x.max())
        for info in self._infos:
            if self._domain[info.segment] != domain or self._read is None:
                continue
            times = self._process_times[info.segment]
            if times.first is not None and times.last is not None:
                first, last = min(first, times.first), max(last, times.last)
        return first, max(last, first + 1)


def _straight(fit: Fit, method: str) -> RankClock:
    first, last = (int(x) for x in fit.x)
    start, end = (float(y) for y in fit.y)
    return RankClock(
        0,
        offset_ns=fit.base + round(start),
        drift=(end - start) / (last - first),
        reference_ns=first,
        residual_ns=fit.residual,
        method=method,
    )


def _broken(fit: Fit, method: str) -> RankClock:
    rise, span = float(fit.y[-1] - fit.y[0]), int(fit.x[-1] - fit.x[0])
    return RankClock(
        0,
        offset_ns=fit.base + round(float(fit.y[0])),
        drift=rise / span,
        reference_ns=int(fit.x[0]),
        residual_ns=fit.residual,
        method=method,
        fit=fit,
    )


def _samples(value: Any) -> Bounds:
    """Returns the exchanges of one process as bounds, without damaged ones."""
    rows = []
    for sample in value if isinstance(value, list) else []:
        if not isinstance(sample, dict):
            continue
        row = [sample.get(key) for key in ("local_ns", "offset_ns", "rtt_ns")]
        if all(_is_number(number) for number in row) and row[2] >= 0:  # type: ignore[operator]
            rows.append([int(number) for number in row])  # type: ignore[arg-type]
    table = np.array(rows, np.int64).reshape(-1, 3)
    base = int(table[0, 1]) if len(table) else 0
    offset = (table[:, 1] - base).astype(np.float64)
    half = table[:, 2] / 2
    return Bounds(table[:, 0], offset - half, offset + half, base)


def _contains_zero(samples: Bounds) -> bool:
    below = samples.low + samples.base <= _READING_NS
    return bool(np.all(below & (samples.high + samples.base >= -_READING_NS)))


def _agrees(samples: Bounds, others: Bounds) -> bool:
    """Whether exchanges can be of the same clock as those of another process."""
    times = np.concatenate([others.x, samples.x])
    first, last = int(times.min()), int(times.max()) + 1
    fit = fit_line(others, first, last) or fit_broken_line(others, first, last)
    return samples.violation(fit) <= fit.residual


def _reversed(samples: Bounds) -> Bounds:
    """Bounds on the offset the other way round, at the other clock's times."""
    there = samples.x + samples.base + np.rint((samples.low + samples.high) / 2).astype(np.int64)
    return Bounds(there, -samples.high, -samples.low, -samples.base)


def _continued(samples: Bounds, onward: RankClock) -> Bounds:
    """Bounds on the offset to a further clock, by way of the one that they lead to."""
    there = samples.x + samples.base + np.rint((samples.low + samples.high) / 2).astype(np.int64)
    more = onward.apply(there) - there
    slack = onward.residual_ns or 0.0
    base = int(more[0]) if len(more) else 0
    further = (more - base).astype(np.float64)
    return Bounds(
        samples.x,
        samples.low + further - slack,
        samples.high + further + slack,
        samples.base + base,
    )


def _wall_offset(info: RankInfo, zero: RankInfo) -> int | None:
    """Offset derived from the wall clocks that both processes read at their start."""
    values = [
        clock.get(key) for clock in (info.clock, zero.clock) for key in ("unix_ns", "monotonic_ns")
    ]
    if not all(_is_number(value) for value in values):
        return None
    unix, monotonic, zero_unix, zero_monotonic = (int(value) for value in values)  # type: ignore[arg-type]
    return (unix - monotonic) - (zero_unix - zero_monotonic)


def worst_residual(clocks: Sequence[RankClock]) -> float | None:
    """The largest residual of all ranks; None if one is unknown."""
    residuals = [clock.residual_ns for clock in clocks]
    known = [value for value in residuals if value is not None]
    return max(known, default=0.0) if len(known) == len(residuals) else None


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number within the bounds of time arithmetic."""
    return type(value) in (int, float) and abs(value) < 1 << 62  # type: ignore[arg-type]
