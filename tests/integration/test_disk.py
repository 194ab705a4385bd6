"""A disk that is full, read-only or gone: the job runs as untraced, and the loss is reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, JOBS, ONE_RANK, on_ranks, run, start, traced, without_native_logs
from support.sampling import sampled

from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run

JOB = """
import torch, torch.distributed as dist
dist.init_process_group('gloo')
t = torch.ones(3)
dist.all_reduce(t)
print(t.tolist())
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system of its own, with some options."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError:
            pytest.skip("there is no mount command")
        if done.returncode != 0:
            pytest.skip("cannot mount a small file system: not root")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_events_all_counted(
    mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    trace, count = mounted("size=1500k") / "trace", 300_000
    job = [sys.executable, str(JOBS / "noisy.py"), str(count)]
    done = run(traced(trace, job), cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (0, f"done {count}\n")
    assert "Traceback" not in done.stderr
    run_info = read_run(trace)
    assert run_info.status == "partial"
    (info,) = run_info.ranks
    table, lost = read_events(trace, info.segment)
    assert lost == 0
    assert info.dropped > 0
    assert sum(kind == "marker" for kind in table["kind"].to_pylist()) + info.dropped == count
    assert any("No space left" in error for error in info.errors)
    line = f"rank 0: {info.dropped:,} events dropped: buffer or disk full"
    assert line in done.stderr
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.status == 0, report.stderr
    assert line in report.stdout


FILLS = """
import errno, gc, os, time
import torch.distributed as dist
from ddltrace import annotate
gc.disable()  # a collection would be an event more
dist.init_process_group("gloo")
def mark(count):
    for number in range(count):
        with annotate(f"part-{{number % 40}}"):
            time.sleep(0.001)
mark(500)
with open({filler!r}, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
mark({during})
{frees}
mark(500)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("stays_full", [False, True])
def test_recording_goes_on_after_a_disk_was_full(
    mounted: Callable[[str], Path], tmp_path: Path, stays_full: bool
) -> None:
    disk, during = mounted("size=2m"), 2500
    trace, filler = disk / "trace", disk / "filler"
    frees = "" if stays_full else f"os.remove({str(filler)!r})"
    code = FILLS.format(filler=str(filler), during=during, frees=frees)
    done = run(traced(trace, [sys.executable, "-c", code]), cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (0, ""), done.stderr
    (info,) = read_run(trace).ranks
    table, lost = read_events(trace, info.segment)
    kept = table["kind"].to_pylist().count("marker")
    assert (kept + info.dropped, lost) == (1000 + during, 0)
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.status == 0, report.stderr
    if stays_full:
        assert info.dropped > 500
        assert f"rank 0: {info.dropped:,} events dropped: buffer or disk full" in report.stdout
        assert "No space left on device" in report.stdout
        assert "the launcher was killed" not in report.stdout
    else:
        assert (read_run(trace).status, read_run(trace).notes) == ("complete", [])


@pytest.mark.long
@pytest.mark.parametrize("status", sampled([0, 8], 1))
@pytest.mark.parametrize("options", ["ro", "size=4k,nr_inodes=2"])
def test_a_disk_that_takes_nothing_from_the_start(
    mounted: Callable[[str], Path], tmp_path: Path, options: str, status: int
) -> None:
    trace = mounted(options) / "trace"
    job = [sys.executable, "-c", f"{JOB}raise SystemExit({status})"]
    for shared in ([], ["--part", "a"]):
        done = run(traced(trace, job, *shared), cwd=tmp_path, **ONE_RANK)
        assert (done.status, done.stdout) == (status, "[1.0, 1.0, 1.0]\n"), done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("ddltrace: nothing is recorded, the job runs untraced: ")


@pytest.mark.parametrize("status", sampled([0, 8], 1))
def test_a_directory_that_vanishes_before_the_job_records(tmp_path: Path, status: int) -> None:
    trace = tmp_path / "trace"
    code = f"import shutil; shutil.rmtree({str(trace)!r})\n{JOB}raise SystemExit({status})"
    done = run(traced(trace, [sys.executable, "-c", code]), cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (status, "[1.0, 1.0, 1.0]\n")
    assert "Traceback" not in done.stderr


# It waits for a signal to continue: a busy machine may take long to remove the directory.
WAITS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sys.stdout.write(f"rank {{dist.get_rank()}} step {{step}}\\n")
    sys.stdout.flush()
    while step == 0 and not os.path.exists({goes_on!r}):
        time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_directory_that_vanishes_in_mid_run(tmp_path: Path) -> None:
    trace, goes_on = tmp_path / "trace", tmp_path / "goes-on"
    (tmp_path / "job.py").write_text(WAITS.format(goes_on=str(goes_on)))
    command = on_ranks(tmp_path / "job.py")
    goes_on.touch()
    # Once in many runs, a thread of PyTorch ends an untraced job with SIGABRT at its exit.
    plain = next(done for _ in range(3) if not (done := run(command, cwd=tmp_path)).status)
    goes_on.unlink()
    process = start(traced(trace, command), cwd=tmp_path, stderr=(tmp_path / "errors").open("w"))
    assert process.stdout is not None
    printed = [process.stdout.readline()]
    while trace.exists():  # what a rank makes or renames meanwhile stops it
        shutil.rmtree(trace, ignore_errors=True)
    goes_on.touch()
    printed += process.stdout.readlines()
    status, errors = process.wait(100), (tmp_path / "errors").read_text()
    assert status == 0, errors
    assert sorted(printed) == sorted(plain.stdout.splitlines(keepends=True))
    ours = [line for line in errors.splitlines() if line.startswith("ddltrace: ")]
    assert ours == [f"ddltrace: nothing was recorded: {trace} was deleted while the job ran"]
    others = set(errors.splitlines()) - set(ours)
    assert without_native_logs(others) == without_native_logs(set(plain.stderr.splitlines()))
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert (report.status, report.stdout, report.stderr.count("\n")) == (1, "", 1)


@pytest.mark.long
def test_a_directory_that_takes_no_more_files_in_mid_run(tmp_path: Path) -> None:
    """Its files grow as before; none can be made, replaced or removed."""
    trace = tmp_path / "trace"
    code = f"""
import subprocess, time
{JOB}
status = subprocess.run(["chattr", "+i", {str(trace)!r}], capture_output=True).returncode
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print("immutable" if status == 0 else "not")
"""
    try:
        done = run(traced(trace, [sys.executable, "-c", code]), cwd=tmp_path, **ONE_RANK)
        if "immutable" not in done.stdout:
            pytest.skip("directories cannot be made immutable here")
        assert (done.status, done.stdout) == (0, "[1.0, 1.0, 1.0]\nimmutable\n")
        assert "Traceback" not in done.stderr
        assert done.stderr.count("note: the trace could not be finalized") == 1
        report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
        assert report.status == 0, report.stderr
        assert "the trace could not be finalized" in report.stdout
        assert "the launcher was killed" not in report.stdout
        (info,) = read_run(trace).ranks
        table, lost = read_events(trace, info.segment)
        assert (lost, table["name"].to_pylist().count("optimizer")) == (0, 10)
    finally:
        subprocess.run(["chattr", "-i", str(trace)], capture_output=True, check=False)


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    """A file system on a loop device, which can be frozen: who writes to it then waits."""
    image, folder = tmp_path / "image", tmp_path / "loop"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError:
            pytest.skip(f"there is no {command[0]}")
        if done.returncode != 0:
            pytest.skip("cannot mount a file system from a file: not root, or no loop devices")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, check=False)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_disk_that_does_not_answer_stops_no_thread_of_the_job(
    freezable: Path, tmp_path: Path
) -> None:
    """The job itself freezes the disk, does all that the trace takes down, and thaws it."""
    code = f"""
import os, subprocess, time
{JOB}
def train(steps):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
train(10)
subprocess.run(["fsfreeze", "-f", {str(freezable)!r}], check=True)
dist.all_reduce(torch.ones(2), group=dist.new_group([0]))
train(10)
time.sleep(0.5)
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
train(10)
print("trained", flush=True)
subprocess.run(["fsfreeze", "-u", {str(freezable)!r}], check=True)
"""
    trace = freezable / "trace"
    done = run(traced(trace, [sys.executable, "-c", code]), cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (0, "[1.0, 1.0, 1.0]\ntrained\n"), done.stderr
    run_info = read_run(trace)
    assert (run_info.status, run_info.notes) == ("complete", [])
    (info,) = run_info.ranks
    assert [group.ranks for group in info.groups] == [(0,), (0,)]
    table, lost = read_events(trace, info.segment)
    assert (lost, table["name"].to_pylist().count("optimizer")) == (0, 30)
