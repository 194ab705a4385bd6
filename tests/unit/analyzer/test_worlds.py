"""Jobs of different sizes, one after the other under one command: each has its own groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddltrace.analyzer.importers.imported import Row, table_of
from ddltrace.analyzer.open_trace import Trace
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.trace_files import segment_name

MS = 1_000_000
STEPS = 4


def jobs_of(sizes: list[int], *, attempts: bool = False) -> Trace:
    """A trace of successive jobs; each has some steps of one all-reduce."""
    run, tables = RunInfo(status="complete", exit_status=0), {}
    for number, size in enumerate(sizes):
        begin = number * 1000 * MS
        for rank in range(size):
            pid = 100 * (number + 1) + rank
            attempt = number if attempts else 0
            info = RankInfo(
                rank=rank,
                segment=segment_name(rank=rank, attempt=attempt, pid=pid),
                pid=pid,
                attempt=attempt,
                world_size=size,
                clock_domain="host",
                clock={"unix_ns": begin + rank, "monotonic_ns": begin + rank},
                groups=[GroupInfo("0", "default_pg", "gloo", tuple(range(size)))],
            )
            run.ranks.append(info)
            rows = []
            for step in range(STEPS):
                at = begin + step * 10 * MS
                rows += [
                    Row(at, at + 9 * MS, "step", "step", "main", step=step),
                    Row(
                        at + 2 * MS,
                        at + 5 * MS,
                        "message",
                        "all_reduce",
                        "comm",
                        step=step,
                        enqueue_ns=at + 2 * MS,
                        op="all_reduce",
                        group="0",
                        seq=step,
                        bytes=64,
                        dtype="float32",
                        status="ok",
                    ),
                ]
            tables[info.segment] = table_of(rows)
    return Trace(Path("jobs"), run, tables)


@pytest.mark.parametrize("attempts", [False, True])
@pytest.mark.parametrize("sizes", [[3, 2], [2, 3], [3, 2, 3], [2, 4, 3, 4], [1, 2], [3, 3], [4]])
def test_each_job_has_its_own_groups(sizes, attempts):
    trace = jobs_of(sizes, attempts=attempts)
    analysis = trace.analyze()
    assert (analysis.joining.collectives, analysis.joining.partial) == (STEPS * len(sizes), 0)
    assert analysis.trace.steps == STEPS * len(sizes)
    assert not [note for note in analysis.trace.notes if "some ranks" in note]
    for number, size in enumerate(sizes):
        name = f"0@{number + 1}" if number else "0"
        assert trace.group_ranks(name) == tuple(range(size))
        assert all(trace.group_ranks(name, rank) == tuple(range(size)) for rank in range(size))
    steps = [row.ranks for row in analysis.steps]
    assert steps == [size for size in sizes for _ in range(STEPS)]


def test_a_step_that_a_rank_lacks_is_still_noted():
    trace = jobs_of([3, 2])
    segment = next(info.segment for info in trace.run.ranks if info.world_size == 2 and info.rank)
    tables = dict(trace._tables)
    tables[segment] = tables[segment].slice(0, 2 * (STEPS - 1))
    analysis = Trace(Path("jobs"), trace.run, tables).analyze()
    assert analysis.joining.partial == 1
    assert any("1 of 8 steps was completed by some ranks only" in n for n in analysis.trace.notes)
