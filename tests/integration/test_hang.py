"""Jobs that hang: the trace, read while they do and after the kill, says who waits for whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.jobs import environment, on_ranks, torchrun, traced

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run

PATIENCE_S = 120


@contextmanager
def hanging(
    trace: Path, how: str, stuck_in: str, ranks: int = 2, *in_thread: str
) -> Iterator[None]:
    """A job that hangs, from when every rank's silence was noted until it is stopped."""
    process = subprocess.Popen(
        traced(trace, on_ranks("hangs.py", how, *in_thread, ranks=ranks)),
        cwd=trace.parent,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all_silent(trace, ranks, stuck_in):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the ranks never fell silent"
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def all_silent(trace: Path, ranks: int, stuck_in: str) -> bool:
    if not (trace / "run.json").exists():
        return False
    stacks = [i.silence["stack"] if i.silence else [] for i in read_run(trace).ranks]
    noted = [stack for stack in stacks if any(" main" in f and "hangs.py" in f for f in stack)]
    return len(noted) == ranks and any(stuck_in in f for stack in noted for f in stack)


def analysis(trace: Path) -> tuple[list[dict[str, Any]], str]:
    """The hangs of the analysis, and the first lines that are printed."""
    analyzed = open_trace(trace).analyze()
    document = json.loads(json.dumps(analyzed.to_json()))
    return document["hangs"], " ".join(render_report(analyzed).split("\n")[:3])


def check(trace: Path, how: str) -> None:
    """What the trace must say of each way to hang."""
    deadline = time.monotonic() + PATIENCE_S
    expected = 2 if how in {"order", "recv"} else 1
    while True:
        hangs, first = analysis(trace)
        # While a job runs, a message counts once it takes far longer than any before it.
        if len(hangs) >= expected or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    hang = hangs[0]
    if how == "skip":
        # DDP's construction and three steps came before; all of them completed.
        assert (hang["op"], hang["entered"], hang["missing"]) == ("all_reduce", [0], [1])
        assert "write_checkpoint" in hang["doing"]["1"]
        assert "is in message all_reduce" in hang["doing"]["0"]
        assert first.startswith(f"all_reduce number {hang['seq']} of group 0 hangs: rank 0 entered")
        assert "rank 1 is at hangs.py" in first
    elif how == "loader":
        assert (hang["op"], hang["entered"], hang["missing"]) == ("all_reduce", [0, 1, 2], [3])
        assert "__getitem__" in hang["doing"]["3"]
        assert "phase data of step 3" in hang["doing"]["3"]
    elif how == "order":
        found = {(h["group"], tuple(h["entered"]), tuple(h["missing"])) for h in hangs}
        groups = sorted({h["group"] for h in hangs})
        assert found == {(groups[0], (0,), (1,)), (groups[1], (1,), (0,))}
        assert "hangs" in first
    elif how == "operation":
        assert hang["called"] == {"0": "broadcast", "1": "all_gather"}
        assert "ranks disagree on what it is: rank 0 broadcast, rank 1 all_gather" in first
    elif how == "recv":
        found = {(h["op"], tuple(h["entered"]), tuple(h["missing"])) for h in hangs}
        assert found == {("recv", (0,), (1,)), ("all_reduce", (1,), (0,))}
        receive = next(h for h in hangs if h["op"] == "recv")
        assert "is in message recv from rank 1" in receive["doing"]["0"]


@pytest.mark.parametrize(
    ("how", "stuck_in", "ranks"),
    [
        ("skip", "write_checkpoint", 2),
        ("loader", "__getitem__", 4),
        ("order", "all_reduce", 2),
        ("operation", "all_gather", 2),
        ("recv", "recv", 2),
    ],
)
@pytest.mark.long
def test_a_hang_is_explained(tmp_path: Path, how: str, stuck_in: str, ranks: int) -> None:
    trace = tmp_path / "trace"
    with hanging(trace, how, stuck_in, ranks):
        check(trace, how)
    run_info = read_run(trace)
    assert run_info.status == "partial"
    assert len(run_info.ranks) == ranks
    check(trace, how)


@pytest.mark.long
def test_a_hang_of_a_thread_is_explained(tmp_path: Path) -> None:
    """Ray trains in another thread than the main one."""
    trace = tmp_path / "trace"
    with hanging(trace, "skip", "write_checkpoint", 2, "in_thread"):
        check(trace, "skip")
    check(trace, "skip")
    for info in read_run(trace).ranks:
        events, _ = read_events(trace, info.segment)
        kinds = zip(events["kind"].to_pylist(), events["lane"].to_pylist(), strict=True)
        assert {lane for kind, lane in kinds if kind in ("phase", "step", "layer")} == {"thread-1"}


def test_the_launcher_killed_leaves_a_trace_that_explains(tmp_path: Path) -> None:
    """Nobody finalizes: what the ranks wrote is read as it lies."""
    trace = tmp_path / "trace"
    process = subprocess.Popen(
        traced(trace, torchrun("hangs.py", "skip")),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all_silent(trace, 2, "write_checkpoint"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        pids = [info.pid for info in read_run(trace).ranks]
        process.kill()
        process.wait(timeout=30)
        check(trace, "skip")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # torchrun notices that its ranks are gone, and ends.
        os.killpg(process.pid, signal.SIGTERM)
    check(trace, "skip")
