"""Clocks fitted from messages of which some are wrong, against clocks whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.analyzer.trace.align import MESSAGES, WALL, RankClock, align
from ddltrace.analyzer.trace.clock_bounds import ProcessTimes, process_times
from ddltrace.analyzer.trace.clock_fit import (
    Bounds,
    fit_constant,
    fit_line,
    without_contradictions,
)
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS

MS = 1_000_000
PERIOD = 58 * MS
SEGMENTS = ("rank-00000-0-10", "rank-00001-0-11")


@dataclass
class Job:
    """All-reduces of two ranks; rank 1's clock is behind rank 0's by `offset + drift t`.

    Attributes:
        rows: For each rank its calls on its own clock.
    """

    seed: int
    offset: int = 0
    drift: float = 0.0
    count: int = 160
    late: int = 2 * MS
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(init=False)
    draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)
        periods = self.draw.normal(PERIOD, PERIOD / 50, self.count).cumsum()
        sizes = self.draw.choice([4096, 65536, 1 << 20], self.count)
        self.rows = ([], [])
        for number, (begin, size) in enumerate(zip(periods, sizes, strict=True)):
            arrivals = begin + self.draw.integers(0, self.late, 2)
            ends = (
                arrivals.max() + self.draw.integers(20_000, 400_000) + self.draw.integers(0, 9, 2)
            )
            for rank in (0, 1):
                start, end = (int(self._on_clock(rank, t)) for t in (arrivals[rank], ends[rank]))
                self.rows[rank].append(call(start, end, int(size), number))

    def _on_clock(self, rank: int, time: float) -> float:
        return time if rank == 0 else (time - self.offset) / (1 + self.drift)

    def error(self, clock: RankClock) -> float:
        """The largest error of a correction over the time of the job, ns."""
        own = np.array([row["start_ns"] for row in self.rows[1]])
        true = own * (1 + self.drift) + self.offset
        return float(np.abs(clock.apply(own) - true).max())

    def align(self, *, numbered: bool) -> tuple[RankClock, list[str]]:
        tables = {name: table(rows) for name, rows in zip(SEGMENTS, self.rows, strict=True)}
        clock = {"monotonic_ns": 0, "unix_ns": 0, "samples": []}
        infos = [
            RankInfo(rank, name, 2, clock_domain=f"host {rank}", clock=dict(clock))
            for rank, name in enumerate(SEGMENTS)
        ]
        if not numbered:
            stripped = {
                name: each.set_column(
                    EVENTS.get_field_index("seq"),
                    EVENTS.field("seq"),
                    pa.nulls(each.num_rows, pa.int64()),
                )
                for name, each in tables.items()
            }
            tables = number_messages(RunInfo(ranks=infos), stripped).tables
        notes: list[str] = []

        def read(some: Sequence[RankInfo]) -> list[ProcessTimes]:
            return [process_times(info, [tables[info.segment]], 0) for info in some]

        found = align(RunInfo(ranks=infos), read, notes)
        return found[SEGMENTS[1]], notes


def call(start: int, end: int, size: int, seq: int) -> dict[str, Any]:
    return {
        "kind": "message",
        "op": "all_reduce",
        "group": "0",
        "status": "ok",
        "bytes": size,
        "out_bytes": size,
        "start_ns": start,
        "enqueue_ns": start,
        "end_ns": end,
        "seq": seq,
    }


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({f.name: [row.get(f.name) for row in rows] for f in EVENTS}, schema=EVENTS)


def spoil(job: Job, how: str) -> None:
    """Makes some calls of rank 1 wrong, missing or extra, as a profiler's file may have them."""
    rows = job.rows[1]
    chosen = sorted(job.draw.choice(job.count - 2, 4, replace=False).tolist(), reverse=True)
    for at in chosen:
        row = rows[at]
        if how == "missing":
            del rows[at]
        elif how == "extra":
            rows.insert(
                at + 1, {**row, "start_ns": row["end_ns"] + MS, "end_ns": row["end_ns"] + 2 * MS}
            )
        elif how == "wrong":
            row["bytes"] = row["out_bytes"] = 12
        else:
            # Two calls under each other's numbers.
            row["seq"], rows[at + 1]["seq"] = rows[at + 1]["seq"], row["seq"]


@pytest.mark.parametrize("offset", [0, 3 * MS, -7_000 * MS])
@pytest.mark.parametrize("how", ["missing", "extra", "wrong", "numbers exchanged"])
def test_the_residual_covers_the_truth_whatever_is_wrong_with_the_calls(how, offset):
    fitted = 0
    for seed in range(12):
        job = Job(seed, offset, drift=float(np.random.default_rng(seed).uniform(-1e-4, 1e-4)))
        spoil(job, how)
        clock, notes = job.align(numbered=how == "numbers exchanged")
        if clock.residual_ns is None:
            assert notes
            continue
        fitted += 1
        assert job.error(clock) <= clock.residual_ns + 2, (how, offset, seed)
        assert clock.residual_ns < 4 * MS
    assert fitted >= 10


@pytest.mark.parametrize("how", ["missing", "extra", "wrong", "numbers exchanged"])
@pytest.mark.parametrize("offset", [0, 8_000, -8_000])
def test_clocks_that_agree_are_not_moved_by_wrong_calls(how, offset):
    for seed in range(6):
        job = Job(seed, offset)
        spoil(job, how)
        clock, _ = job.align(numbered=how == "numbers exchanged")
        assert clock.method == MESSAGES
        assert (clock.offset_ns, clock.drift) == (0, 0.0)
        assert job.error(clock) <= clock.residual_ns


def test_a_clock_that_satisfies_all_bounds_is_left_alone_without_a_note():
    job = Job(3, 8_000)
    clock, notes = job.align(numbered=True)
    assert (clock.offset_ns, clock.drift, clock.method, notes) == (0, 0.0, MESSAGES, [])
    assert 8_000 <= clock.residual_ns < 2 * MS


def test_exchanged_numbers_are_left_out_with_a_note():
    job = Job(5, 3 * MS)
    spoil(job, "numbers exchanged")
    clock, notes = job.align(numbered=True)
    assert clock.method == MESSAGES
    assert len(notes) == 1
    assert "the clock of rank 1: some of its messages contradict" in notes[0]


def test_messages_that_contradict_each_other_too_much_give_no_fit():
    job = Job(5, 3 * MS)
    for row in job.rows[1][80:]:
        row["seq"] += 1
    clock, notes = job.align(numbered=True)
    assert (clock.method, clock.residual_ns, clock.offset_ns) == (WALL, None, 0)
    assert len(notes) == 1
    assert "the clock of rank 1 cannot be fitted" in notes[0]


def test_bounds_that_agree_are_all_kept():
    low, high = np.array([-5.0, -3.0]), np.array([4.0, 9.0])
    none = np.array([np.inf, np.inf])
    bounds = Bounds(np.array([0, 100, 50, 80]), np.append(low, -none), np.append(none, high), 1_000)
    assert without_contradictions(bounds, 0, 100) is bounds
    middle = fit_line(bounds, 0, 100)
    still = fit_constant(bounds, 0, 100, 1_002)
    assert middle is not None
    assert still is not None
    assert middle.residual < still.residual <= 2 * middle.residual + 2
    assert fit_constant(bounds, 0, 100, 1_010) is None
