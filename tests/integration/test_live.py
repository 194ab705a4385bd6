"""A running job, followed: what is read, and the ranks that are named when it goes wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.jobs import at_once, environment, on_ranks, run, traced

from ddltrace.analyzer.live.live_state import LiveState
from ddltrace.analyzer.live.live_trace import LiveTrace
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.counters import read_counters
from ddltrace.tracer.trace.run_reader import read_run

PATIENCE_S = 120


@contextmanager
def running(trace: Path, *job: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        traced(trace, on_ranks(*job)),
        cwd=trace.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def state_when(live: LiveTrace, holds: Callable[[LiveState], object]) -> LiveState:
    """The first state for which a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state = live.state()
        if holds(state):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


@contextmanager
def following(trace: Path, process: subprocess.Popen[str]) -> Iterator[LiveTrace]:
    deadline = time.monotonic() + PATIENCE_S
    while not (trace / "run.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    live = LiveTrace(trace)
    try:
        yield live
    finally:
        live.close()


@pytest.mark.long
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with running(trace, "trains_on.py") as process, following(trace, process) as live:
        before = state_when(live, lambda s: s.num_steps > 20 and s.rows[0].cpu_cores is not None)
        assert (before.status, before.alerts, before.world_size) == ("running", (), 2)
        assert [row.rank for row in before.rows] == [0, 1]
        assert all(us > 0 for us in before.step_us)
        assert len(before.lanes) == 2
        assert all(len(lane.compute.start) for lane in before.lanes)
        assert sum(row.late_share or 0 for row in before.rows) == pytest.approx(1)
        victim = next(info for info in read_run(trace).ranks if info.rank == 1)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        after = state_when(live, lambda s: s.alerts)
        assert after.alerts[0].ranks == (1,)
        assert "killed by SIGKILL" in after.alerts[0].text
        print(f"named after {time.monotonic() - killed_s:.1f} s")
        ended = state_when(live, lambda s: s.status != "running")
        assert ended.alerts[0].ranks == (1,)
        assert ended.exit_status not in (None, 0)
    # What the killed rank had written of its counters is kept and finalized.
    counters, lost = read_counters(trace, victim.segment)
    assert lost == 0
    assert "process_memory" in counters["name"].to_pylist()
    assert open_trace(trace).counters(1).num_rows == len(counters)


def test_a_rank_that_does_not_join_a_collective_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with running(trace, "hangs.py", "skip") as process, following(trace, process) as live:
        alert = state_when(live, lambda s: s.alerts).alerts[0]
        assert (alert.kind, alert.ranks) == ("hang", (1,))
        assert "Rank 1 has not joined all_reduce" in alert.text
        # The place in its code is known as soon as its silence was noticed.
        named = state_when(live, lambda s: "write_checkpoint" in "".join(a.text for a in s.alerts))
        assert named.alerts[0].ranks == (1,)
        assert named.status == "running"


def test_the_dashboard_beside_a_job_leaves_output_and_status_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = on_ranks("fails.py", "7")
    beside, plain = at_once(
        lambda: run(traced(trace, command, "--dashboard", "--no-counters"), cwd=tmp_path),
        lambda: run(command, cwd=tmp_path),
    )
    assert (beside.status, beside.stdout) == (plain.status, plain.stdout)
    assert re.search(r"Dashboard: http://127\.0\.0\.1:\d+/live\?token=\S+ ", beside.stderr)
    # Nor were counters recorded, which were not wanted.
    assert not list(trace.glob("counters-*"))
