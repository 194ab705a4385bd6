"""Recording switched on and off in a running job: ``ddltrace on``, ``off`` and ``level``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from support.jobs import (
    DDLTRACE,
    JOBS,
    Done,
    at_once,
    free_port,
    on_ranks,
    run,
    start,
    traced,
)
from support.sampling import sampled

import ddltrace
from ddltrace.tracer.trace.run_files import read_sidecars
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.schema import GARBAGE_COLLECTION

WAYS = ["ddp", "communication hook", "gradient hooks", "fsdp", "two models", "compiled"]
WINDOWS = (*range(4, 8), *range(11, 16))
SWITCHES = ("4", "8", "11", "16")
OFF_STEPS = 16  # of the 20 of the job, if 4 are recorded
PATIENCE_S = 90.0

NAMES = ("kind", "op", "name", "bytes", "out_bytes", "dtype", "phase", "tensors", "status")

Contents = dict[tuple[int, int | None], Counter[tuple[str, ...]]]


def contents(trace: Path) -> Contents:
    """What was recorded of each step on each rank, but for times and garbage collections."""
    found: Contents = defaultdict(Counter)
    opened = ddltrace.open(trace)
    for rank in opened.ranks:
        events = opened.events(rank)
        names = [name for name in NAMES if name in events.column_names]
        columns = [events[name].to_pylist() for name in names]
        for step, *values in zip(events["step"].to_pylist(), *columns, strict=True):
            if GARBAGE_COLLECTION not in values:
                found[rank, step][tuple(map(str, values))] += 1
    return found


@pytest.mark.long
@pytest.mark.parametrize("way", sampled(WAYS, 1))
def test_a_switched_job_records_its_windows_as_one_that_is_recorded_throughout(
    way: str, tmp_path: Path
) -> None:
    on_demand, throughout = tmp_path / "on-demand", tmp_path / "throughout"
    jobs = [
        on_ranks("switched.py", way),
        traced(on_demand, on_ranks("switched.py", way, *SWITCHES), "--off"),
        traced(throughout, on_ranks("switched.py", way)),
    ]
    untraced, switched, whole = at_once(
        *(lambda job=job: run(job, cwd=tmp_path, timeout=280) for job in jobs)
    )
    assert (untraced.status, switched.status, whole.status) == (0, 0, 0), switched.stderr
    losses = [line for line in untraced.stdout.splitlines() if line.startswith("losses")]
    for done in (switched, whole):
        assert [line for line in done.stdout.splitlines() if line.startswith("losses")] == losses
    part, all_of_it = contents(on_demand), contents(throughout)
    assert {step for _, step in part if step is not None} == set(WINDOWS)
    for rank in (0, 1):
        for step in WINDOWS:
            assert part[rank, step] == all_of_it[rank, step]
            assert any(row[0] == "message" for row in part[rank, step])
    info = read_run(on_demand)
    assert info.status == "complete"
    assert any("steps 4 to 7 (layer), steps 11 to 15 (layer)" in note for note in info.notes)
    assert [rank.errors for rank in info.ranks] == [[], []]


def test_while_off_no_function_of_the_tracer_runs_for_a_message_or_a_layer(tmp_path: Path) -> None:
    command = traced(tmp_path / "trace", on_ranks("switched.py", "ddp", "4", "8"), "--off")
    done = run(command, cwd=tmp_path)
    assert done.status == 0, done.stderr
    called = [line for line in done.stdout.splitlines() if line.startswith("called")]
    assert len(called) == 2
    for line in called:
        counts: dict[str, int] = json.loads(line.removeprefix("called "))
        often = {name for name, count in counts.items() if count >= OFF_STEPS // 2}
        often.discard("change")  # of one patch; all of them are put in at once
        assert often == {
            *("backward", "begin_unrecorded", "after_step", "count_update"),
        }, counts


def wait_for(trace: Path, ranks: int, job: subprocess.Popen[str]) -> None:
    """Waits until all ranks take orders and train."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        folders = [trace, *trace.glob("part-*")]
        infos = [info for folder in folders for info in read_sidecars(folder, [])]
        trains = (trace.parent / "trains").exists()
        if trains and sum(bool(info.control) for info in infos) == ranks:
            return
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    raise AssertionError("the ranks do not take orders")


def wait_until_off(trace: Path, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Waits until the ranks have recorded the range that begins with a step."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        infos = [info for info in read_sidecars(trace, []) if info.rank in ranks]
        if all(info.is_off and info.windows[-1]["first"] == step for info in infos):
            return
        time.sleep(0.1)
    raise AssertionError("the range does not end")


def wait_for_windows(trace: Path, ranks: int) -> None:
    """Waits until all ranks have recorded a range of steps to its end."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        infos = [info for folder in trace.glob("part-*") for info in read_sidecars(folder, [])]
        if sum(len(info.windows) > 1 and info.is_off for info in infos) == ranks:
            return
        time.sleep(0.1)
    raise AssertionError("nothing was recorded")


@contextmanager
def running(tmp_path: Path, *options: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A traced job of two ranks that trains inside the context."""
    trace, stop = tmp_path / "trace", tmp_path / "stop"
    command = traced(trace, on_ranks("switched.py", "ddp", "until", str(stop)), *options)
    job = start(command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        wait_for(trace, 2, job)
        yield trace, job
        stop.touch()
        _, errors = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, errors
    finally:
        stop.touch()  # the ranks would outlive their launcher
        job.kill()


def order(*arguments: str, cwd: Path) -> Done:
    return run([*DDLTRACE, *arguments], cwd=cwd)


def answer(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = order(*arguments, "--json", cwd=cwd)
    assert done.status == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def steps_of(trace: Path, rank: int) -> list[int]:
    events = ddltrace.open(trace).events(rank)
    kinds, steps = events["kind"].to_pylist(), events["step"].to_pylist()
    return [step for kind, step in zip(kinds, steps, strict=True) if kind == "step"]


def test_orders_reach_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    with running(tmp_path, "--off") as (trace, job):
        path = read_sidecars(trace, [])[0].control
        first = answer("on", "trace", "--steps", "5", cwd=tmp_path)
        assert first == {"step": first["step"], "ranks": [0, 1], "missing": [], "reasons": {}}
        assert first["step"] > 0
        wait_until_off(trace, first["step"])
        second = answer("on", str(job.pid), "--level", "comm", cwd=tmp_path)
        third = answer("level", "trace", "layer", cwd=tmp_path)
        fourth = answer("off", "trace", cwd=tmp_path)
        assert first["step"] + 5 <= second["step"] < third["step"] < fourth["step"]
        one = order("on", "trace", "--ranks", "1,7", "--steps", "2", "--json", cwd=tmp_path)
        assert one.status == 1
        partial = json.loads(one.stdout)
        assert (partial["ranks"], partial["missing"]) == ([1], [7])
        wait_until_off(trace, partial["step"], (1,))
        of_operators = answer("on", "trace", "--level", "op", "--steps", "4", cwd=tmp_path)
        wait_until_off(trace, of_operators["step"])
    both = [
        *range(first["step"], first["step"] + 5),
        *range(second["step"], fourth["step"]),
    ]
    at_op = range(of_operators["step"], of_operators["step"] + 4)
    assert steps_of(trace, 0) == [*both, *at_op]
    assert steps_of(trace, 1) == [*both, partial["step"], partial["step"] + 1, *at_op]
    events = ddltrace.open(trace).events(0)
    layers = {
        step
        for kind, step in zip(events["kind"].to_pylist(), events["step"].to_pylist(), strict=True)
        if kind == "layer"
    }
    at_comm = set(range(second["step"], third["step"]))
    assert layers == (set(both) - at_comm) | set(at_op)
    operators = {
        step
        for kind, step in zip(events["kind"].to_pylist(), events["step"].to_pylist(), strict=True)
        if kind == "host"
    }
    assert set(at_op[:3]) <= operators <= set(at_op)
    gradients = [
        step
        for kind, step in zip(events["kind"].to_pylist(), events["step"].to_pylist(), strict=True)
        if kind == "gradient"
    ]
    assert set(gradients) == layers  # none of those that became ready while nothing was recorded
    assert not Path(path).parent.exists()


LATE = ["late_rank.py", "2:{}:40:sleep:0:200", "1", "200"]
LATE_TRIGGER = ("--trigger", "late>15ms every 2s for 5 steps")


def check_late_rank(trace: Path) -> None:
    for info in read_run(trace).ranks:
        reasons = [window.get("reason", "") for window in info.windows]
        assert "a look for a late rank" in reasons
        late = [reason for reason in reasons if "was late" in reason]
        assert all(reason.startswith("rank 2 was late by ") for reason in late)
    events = ddltrace.open(trace).events(0)
    steps = set(events.filter(pc.equal(events["kind"], "layer"))["step"].to_pylist())
    assert len(steps) == 5 * len(late) > 0  # twice if the rank seemed in time meanwhile


@pytest.mark.long
@pytest.mark.parametrize("activity", sampled(["data", "backward", "optimizer"], 1))
def test_a_late_rank_begins_a_range(activity: str, tmp_path: Path) -> None:
    command = on_ranks(*(text.format(activity) for text in LATE), ranks=3)
    done = run(traced(tmp_path / "trace", command, *LATE_TRIGGER), cwd=tmp_path)
    assert done.status == 0, done.stderr
    check_late_rank(tmp_path / "trace")


@pytest.mark.long
def test_a_late_rank_of_another_launcher_begins_a_range(tmp_path: Path) -> None:
    job = [text.format("data") for text in LATE]
    for launcher in three_launchers(tmp_path, job, *LATE_TRIGGER):
        _, errors = launcher.communicate(timeout=PATIENCE_S)
        assert launcher.returncode == 0, errors
    check_late_rank(tmp_path / "trace")


@pytest.mark.long
def test_a_job_that_was_never_switched_on_says_so(tmp_path: Path) -> None:
    with running(tmp_path, "--off") as (trace, _):
        pass
    report = order("analyze", "trace", cwd=tmp_path)
    said = " ".join((report.stdout + report.stderr).split())
    assert "no step (ddltrace on begins it while the job runs)" in said
    assert "Traceback" not in report.stderr
    assert read_run(trace).status == "complete"


@pytest.mark.long
def test_strangers_change_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as (trace, job):
        path = read_sidecars(trace, [])[0].control
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(Path(path).parent).st_mode & 0o777 == 0o700
        lines = [b"\n", b"{}\n", b"[1]\n", b"{" + b"a" * (2 << 20), b'{"do": "plan"}\n']
        lines += [b'{"do": "plan", "changes": [[-1, "layer"]]}\n', b'{"do": "order"}\n']
        lines += [b'{"do": "plan", "changes": [[1, "all"]]}\n', b'{"do": "plan", "changes": []}\n']
        for line in lines:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(10)
                stranger.connect(path)
                try:
                    stranger.sendall(line)
                    assert b'"error"' in stranger.recv(4096) or line in lines[:4]
                except (BrokenPipeError, ConnectionResetError):
                    assert line in lines[:4]
        assert job.poll() is None
        assert answer("off", "trace", cwd=tmp_path)["ranks"] == [0, 1]
    assert all(info.errors == [] for info in read_run(trace).ranks)


def test_what_is_no_job_is_named_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in ("nothing", "empty", str(os.getpid()), "99999999"):
        done = order("on", target, cwd=tmp_path)
        assert done.status != 0
        assert len(done.stderr.splitlines()) == 1, done.stderr


def three_launchers(tmp_path: Path, job: list[str], *options: str) -> list[subprocess.Popen[str]]:
    """A job of three ranks, each with a launcher of its own."""
    port, (script, *arguments) = free_port(), job
    jobs = []
    for node in range(3):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={node}"),
            *("--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"),
            *(str(JOBS / script), *arguments),
        ]
        command = traced(tmp_path / "trace", command, *options)
        jobs.append(start(command, cwd=tmp_path, stderr=subprocess.PIPE))
    return jobs


@pytest.mark.long
def test_an_order_reaches_the_ranks_of_other_launchers(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    jobs = three_launchers(tmp_path, ["switched.py", "ddp", "until", str(stop)], "--off")
    try:
        wait_for(tmp_path / "trace", 3, jobs[0])
        part = sorted((tmp_path / "trace").glob("part-*"))[2]
        # The launchers find each other within a second of the first step.
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = order("on", str(part), "--steps", "4", "--json", cwd=tmp_path)
            found = json.loads(done.stdout)
            if found["ranks"] == [0, 1, 2] or time.monotonic() > deadline:
                break
            time.sleep(1)
        assert found["ranks"] == [0, 1, 2]
        assert found["missing"] == []
        wait_for_windows(tmp_path / "trace", 3)
        stop.touch()
        for job in jobs:
            _, errors = job.communicate(timeout=PATIENCE_S)
            assert job.returncode == 0, errors
    finally:
        stop.touch()
        for job in jobs:
            job.kill()
    for rank in range(3):
        assert steps_of(tmp_path / "trace", rank)[-4:] == list(
            range(found["step"], found["step"] + 4)
        )
