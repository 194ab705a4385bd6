"""However a rank dies, its job's outcome is its own and its trace is readable and marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, JOBS, at_once, run, traced
from support.memory_cgroup import memory_cgroup

from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run

STEPS = 20
# A way to die, and the exit status that it gives.
WAYS = {
    "returns": 0,
    "out_of_memory": 1,
    "os_exit": 6,
    "exec": 8,
    "sigkill": -9,
    "sigterm": -15,
    "abort": -6,
    "segfault": -11,
}
CLOSED = ("returns", "out_of_memory")


@pytest.mark.long
def test_each_rank_dies_in_its_own_way(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "deaths.py"), *WAYS]
    trace = tmp_path / "trace"
    plain, done = at_once(
        lambda: run(job, cwd=tmp_path), lambda: run(traced(trace, job), cwd=tmp_path)
    )
    assert (plain.status, json.loads(plain.stdout)) == (0, WAYS), plain.stderr
    assert (done.status, done.stdout) == (0, plain.stdout), done.stderr
    report = run([*DDLTRACE, "analyze", str(trace), "--full"], cwd=tmp_path)
    assert report.status == 0, report.stderr
    infos = {info.rank: info for info in read_run(trace).ranks}
    for rank, way in enumerate(WAYS):
        killed = way not in CLOSED
        assert infos[rank].status == ("killed" if killed else "complete"), way
        assert infos[rank].errors == [], way
        # Its parent waits for it, too, and may have been the faster.
        status = WAYS[way] if WAYS[way] >= 0 else 128 - WAYS[way]
        assert infos[rank].exit_status in (status, None), way
        line = f"rank {rank} ended without closing its trace"
        assert (done.stderr.count(line), report.stdout.count(line)) == (killed, killed), way
        table, lost = read_events(trace, infos[rank].segment)
        assert (lost, table["name"].to_pylist().count("optimizer")) == (0, STEPS), way


@pytest.mark.long
def test_ranks_that_the_kernel_kills_for_want_of_memory(tmp_path: Path) -> None:
    """All but rank 0 share a cgroup of too little memory, and run out of it one after the other."""
    trace, victims = tmp_path / "trace", 3
    with memory_cgroup(384 << 20) as cgroup:
        job = [sys.executable, str(JOBS / "out_of_memory.py"), str(cgroup), str(victims)]
        done = run(traced(trace, job), cwd=tmp_path)
    assert not cgroup.exists()
    assert done.status == 40 + victims, done.stderr
    deaths = {line["rank"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert [deaths[rank]["status"] for rank in range(victims + 1)] == [0, *[-9] * victims]
    lost_ms = [deaths[rank]["lost_ms"] for rank in range(1, victims + 1)]
    assert max(lost_ms) < 1000, lost_ms
    report = run([*DDLTRACE, "analyze", str(trace), "--full"], cwd=tmp_path)
    assert report.status == 0, report.stderr
    for info in read_run(trace).ranks:
        table, _ = read_events(trace, info.segment)
        table.validate(full=True)
        updates, death = table["name"].to_pylist().count("optimizer"), deaths[info.rank]
        assert death["sure"] <= updates <= death["steps"] + 1, death
        assert info.errors == []
        killed = info.rank > 0
        assert info.status == ("killed" if killed else "complete")
        assert killed or updates == death["steps"]
        line = f"rank {info.rank} ended without closing its trace"
        assert (done.stderr.count(line), report.stdout.count(line)) == (killed, killed)
