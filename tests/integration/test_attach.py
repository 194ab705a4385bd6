"""A running job that was started without ddltrace is armed from outside: ``ddltrace attach``.

`sys.remote_exec` needs Python 3.14. On older versions, the job runs the same script in a signal
handler, which Python also calls on the main thread between two instructions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from support.jobs import DDLTRACE, Done, on_ranks, run, start

import ddltrace
from ddltrace.tracer.attach_job import Deliver, Outcome, attach_to, directory_of, ranks_of
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.switch_commands import attach
from ddltrace.tracer.trace.run_files import read_sidecars
from ddltrace.tracer.trace.run_reader import read_run

PATIENCE_S = 90.0
WINDOW = 5
MESSAGES = Counter(
    [
        # DDP broadcasts the buffers of the batch norm by type, and sends all gradients in a bucket.
        *[("broadcast", 4 * 2 * 16), ("broadcast", 8)],
        ("all_reduce", 4 * (16 * 16 + 16 + 16 + 16 + 16 * 4 + 4)),
        *[("all_reduce", 4), ("all_reduce", 4 * 1000)],
    ]
)
"""What a step of the job sends: operations and bytes."""

OF_FSDP = Counter([("all_gather", 4 * (4 * 4 + 4) // 2), ("reduce_scatter", 4 * (4 * 4 + 4))])
"""The same of its second model, with two ranks."""

remote_exec: Deliver | None = getattr(sys, "remote_exec", None)


def wait_for(job: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, paths
        time.sleep(0.05)


@contextmanager
def running(folder: Path, *marks: str, ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """A job that runs inside the context; its output is read after it."""
    for mark in marks:
        (folder / mark).touch()
    command = on_ranks("attached.py", str(folder), ranks=ranks)
    job = start(command, cwd=folder, stderr=subprocess.PIPE)
    try:
        name = "ready" if "wait" in marks else "trains"
        wait_for(job, *(folder / f"{name}-{rank}" for rank in range(ranks)))
        yield job
    finally:
        for mark in marks:
            (folder / mark).unlink(missing_ok=True)
        (folder / "stop").touch()
        try:
            job.wait(PATIENCE_S)
        finally:
            job.kill()


def by_signal(folder: Path) -> Deliver:
    def deliver(pid: int, script: Path) -> None:
        (folder / f"script-{pid}").write_text(str(script))
        os.kill(pid, signal.SIGUSR1)

    return deliver


def order(*arguments: str, cwd: Path) -> Done:
    return run([*DDLTRACE, *arguments], cwd=cwd)


def switched_on(folder: Path, *options: str) -> dict[str, Any]:
    """The answer to `ddltrace on`, as soon as all ranks can follow."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = order("on", "trace", "--steps", str(WINDOW), "--json", *options, cwd=folder)
        answer: dict[str, Any] = json.loads(done.stdout)
        if not answer["missing"]:
            return answer
        # No step is recorded before all ranks can tell which one it is.
        assert "cannot be matched" in answer["reasons"]["0"], answer
        assert answer["ranks"] == []
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)


def wait_until_recorded(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(
        len(info.windows) > 1 and info.is_off for info in read_sidecars(folder / "trace", [])
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def check_messages(trace: Path, first: int, ranks: int, expected: Counter[Any]) -> None:
    """Checks that all messages and gradients of the recorded steps are there, and no others, on
    all ranks."""
    opened = ddltrace.open(trace)
    names = ("step", "group", "seq", "op", "bytes", "name", "status")
    found = []
    for rank in opened.ranks:
        events = opened.events(rank).to_pylist()
        found.append(sorted([e[n] for n in names] for e in events if e["kind"] == "message"))
        buckets = [e for e in events if e["name"] == "bucket 0"]
        assert [len(bucket["tensors"]) for bucket in buckets] == [6] * WINDOW
        assert sum(e["kind"] == "gradient" for e in events) == 8 * WINDOW
    assert found == [found[0]] * ranks
    for step in range(first, first + WINDOW):
        assert Counter((row[3], row[4]) for row in found[0] if row[0] == step) == expected
    assert len(found[0]) == WINDOW * expected.total()
    assert {row[-1] for row in found[0]} == {"ok"}


def deliverers() -> list[Any]:
    missing = pytest.mark.skipif(
        remote_exec is None, reason="sys.remote_exec: Python 3.14 or later"
    )
    return [pytest.param("signal"), pytest.param("remote_exec", marks=missing)]


@pytest.mark.long
@pytest.mark.parametrize("by", deliverers())
def test_a_job_is_armed_while_it_trains(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = by_signal(tmp_path) if by == "signal" or remote_exec is None else remote_exec
    trace, scripts = tmp_path / "trace", []

    def noting(pid: int, script: Path) -> None:
        scripts.append(script)
        assert script.parent.stat().st_mode & 0o777 == 0o700
        deliver(pid, script)

    with running(tmp_path, "block") as job:
        by_rank = {psutil.Process(pid).environ()["RANK"]: pid for pid in ranks_of(job.pid)}
        first, second = by_rank["0"], by_rank["1"]
        assert sorted(ranks_of(first)) == sorted([first, second])
        time.sleep(0.5)  # until the first rank waits for the second one in a collective
        (late,) = attach_to([first], trace, deliver=noting, timeout_s=0.5)
        assert "not come back to the interpreter in 0.5 s" in (late.error or "")
        (outcome,) = attach_to([second], trace, deliver=noting)
        assert outcome == Outcome(second, rank=1, world_size=2)
        assert not scripts[1].parent.exists()
        (tmp_path / "block").unlink()
        deadline = time.monotonic() + PATIENCE_S
        while scripts[0].parent.exists():  # the late rank removes its script and does no more
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert directory_of(first) is None
        monkeypatch.setattr(sys, "remote_exec", deliver, raising=False)
        said = CliRunner().invoke(attach, [str(job.pid)], standalone_mode=False)
        lines = ["armed: ranks 0", f"armed before: processes {second}"]
        assert (said.return_value, said.stdout.splitlines()) == (0, lines)
        assert f"next: ddltrace on {trace} --steps 50" in said.stderr
        assert directory_of(first) == trace
        again = order("attach", str(job.pid), cwd=tmp_path)
        assert (again.status, again.stdout) == (0, f"process {job.pid} is armed\n")
        answer = switched_on(tmp_path)
        wait_until_recorded(tmp_path)
    printed, errors = job.communicate()
    assert (job.returncode, errors) == (0, "")
    losses = printed.splitlines()
    (tmp_path / "stop").unlink()
    untraced = run(on_ranks("attached.py", str(tmp_path), str(len(losses))), cwd=tmp_path)
    assert untraced.stdout.splitlines() == losses
    assert [rank.errors for rank in read_run(trace).ranks] == [[], []]
    check_messages(trace, answer["step"], 2, MESSAGES + OF_FSDP)
    rows = ddltrace.open(trace).analyze().collectives
    assert {(row.op, row.bytes): (row.count, row.incomplete) for row in rows} == dict.fromkeys(
        MESSAGES + OF_FSDP, (WINDOW, 0)
    )


@pytest.mark.long
def test_a_process_that_has_not_joined_a_group_is_armed_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, "wait", ranks=1) as job:
        (pid,) = ranks_of(job.pid)
        trace = tmp_path / "trace"
        monkeypatch.setattr(sys, "remote_exec", by_signal(tmp_path), raising=False)
        arguments = [str(pid), "-o", str(trace)]
        said = [CliRunner().invoke(attach, arguments, standalone_mode=False) for _ in range(2)]
        assert [(one.return_value, one.stdout) for one in said] == [
            (0, f"process {pid} will be armed when it joins a process group\n"),
            (1, f"process {pid} is not armed: it was armed before\n"),
        ]
        (tmp_path / "wait").unlink()
        wait_for(job, tmp_path / "trains-0")
        answer = switched_on(tmp_path)
        wait_until_recorded(tmp_path)
    assert job.returncode == 0
    check_messages(trace, answer["step"], 1, MESSAGES)


LAUNCHER = """
import os, subprocess, sys, time
depth = int(sys.argv[1])
for rank in range([2, 1, 0][depth]):
    environment = dict(os.environ)
    if depth == 0:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": sys.argv[2]}
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth + 1), *sys.argv[2:]],
                     env=environment)
os.write(1, f"{depth} {os.getpid()}\\n".encode())  # whole: all share a pipe
sys.stdin.read()
"""
"""A launcher, whose pod has a rank, starts two ranks, and each of them a helper."""


def test_ranks_are_told_from_their_launchers_and_their_helpers() -> None:
    pod = os.environ | {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    jobs = []
    for port in ("1", "2"):
        command = [sys.executable, "-c", LAUNCHER, "0", port, LAUNCHER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        jobs.append(subprocess.Popen(command, env=pod, text=True, **pipes))
    try:
        for job in jobs:
            assert job.stdout is not None
            started = [job.stdout.readline().split() for _ in range(5)]
            by_depth = {depth: [int(p) for d, p in started if d == depth] for depth in "012"}
            ranks = sorted(by_depth["1"])
            assert by_depth["0"] == [job.pid]
            for pid in (job.pid, *ranks, *by_depth["2"]):
                assert sorted(ranks_of(pid)) == ranks
        with pytest.raises(UsageError, match="several jobs are below"):
            ranks_of(os.getpid())
    finally:
        for job in jobs:
            job.communicate()  # closes its input, and that of the processes below it


def test_who_cannot_be_armed_is_named_in_a_line(tmp_path: Path) -> None:
    cases = {os.getpid(): "was started without ddltrace", 99999999: "there is no process"}
    processes = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])]
    cases |= {processes[0].pid: "is not Python", processes[1].pid: "has ended"}
    if os.geteuid() == 0:
        processes.append(subprocess.Popen(["sleep", "60"], user=65534))
        cases[processes[-1].pid] = "only that user can arm it"
    if remote_exec is not None:
        del cases[os.getpid()]
    try:
        for pid, reason in cases.items():
            done = order("attach", str(pid), cwd=tmp_path)
            assert (done.status, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert reason in done.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_process_is_told(tmp_path: Path) -> None:
    def without_packages(_: int, script: Path) -> None:
        subprocess.run([sys.executable, "-I", "-S", str(script)], check=True)

    def forbidden(_: int, __: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    def disabled(_: int, __: Path) -> None:
        raise RuntimeError("Remote debugging is not enabled in the remote process")

    errors = {
        without_packages: "-m pip install ddltrace",
        forbidden: "CAP_SYS_PTRACE",
        disabled: "RuntimeError: Remote debugging is not enabled in the remote process",
    }
    for deliver, reason in errors.items():
        (outcome,) = attach_to([os.getpid()], tmp_path / "trace", deliver=deliver)
        assert outcome.error is not None
        assert reason in outcome.error
        assert "\n" not in outcome.error
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="holds other files"):
        attach_to([os.getpid()], tmp_path, deliver=forbidden)
