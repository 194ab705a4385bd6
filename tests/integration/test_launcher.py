"""The launcher: statuses, signals, deaths, and jobs that stand in its way."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.compute as pc
import pytest
from support.jobs import (
    DDLTRACE,
    JOBS,
    ONE_RANK,
    Done,
    on_ranks,
    run,
    start,
    torchrun,
    traced,
)
from support.traces import read_last_rows

from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.launcher import prepare_directory
from ddltrace.tracer.trace.run_reader import read_run


def test_the_jobs_status_comes_back(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "fails.py"), "7"]
    done = run(traced(tmp_path / "trace", job), cwd=tmp_path, **ONE_RANK)
    assert done.status == 7
    assert read_run(tmp_path / "trace").exit_status == 7


def test_of_launchers_that_start_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    together, refused = threading.Barrier(4), []

    def prepare(directory: Path) -> None:
        together.wait()
        try:
            prepare_directory(directory, force=False)
        except UsageError as error:
            refused.append(str(error))

    for number in range(50):
        launchers = [
            threading.Thread(target=prepare, args=(tmp_path / str(number),)) for _ in range(4)
        ]
        for launcher in launchers:
            launcher.start()
        for launcher in launchers:
            launcher.join(30)
        assert len(refused) == 3 * (number + 1)
        assert read_run(tmp_path / str(number)).status == "running"
    assert all("choose another with -o" in text for text in refused)


def test_a_job_that_is_not_distributed_is_told_apart(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", [sys.executable, "-c", "print('hello')"]), cwd=tmp_path)
    assert done.status == 1
    assert done.stdout == "hello\n"
    assert "nothing was recorded" in done.stderr
    assert "init_process_group" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_run(tmp_path / "trace").status == "partial"
    told = [["analyze"], ["compare", "trace"], ["query", "FROM steps"], ["dashboard"]]
    for command, *others in told:
        arguments = [sys.executable, "-m", "ddltrace", command, "trace", *others]
        done = run(arguments, cwd=tmp_path)
        said = (done.stdout + done.stderr).lower()
        assert "nothing was recorded: no process joined a process group" in said
        assert "ddltrace dashboard" not in said
        assert done.status == (0 if command == "analyze" else 1)


def test_a_missing_command_is_one_line(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", ["no-such-command"]), cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.strip() == "ddltrace: command not found: no-such-command"


def test_a_directory_is_never_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    job = [sys.executable, "-c", "pass"]
    for options in ([], ["--force"]):
        done = run(traced(tmp_path / "mine", job, *options), cwd=tmp_path)
        assert done.status == 2
        assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_force_replaces_a_trace_and_nothing_else(tmp_path: Path) -> None:
    trace, job = tmp_path / "trace", [sys.executable, "-c", "pass"]
    run(traced(trace, job), cwd=tmp_path)
    (trace / "own").touch()
    # Nothing was recorded: the corrected command needs no --force.
    assert run(traced(trace, job), cwd=tmp_path).status == 1
    (trace / "rank-00000-0-1.arrow").touch()
    assert run(traced(trace, job), cwd=tmp_path).status == 2
    run(traced(trace, job, "--force"), cwd=tmp_path)
    assert {path.name for path in trace.iterdir()} == {"own", "run.json"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_job(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "def stop(n, f): print('got', n, flush=True); sys.exit(40 + n)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start(
        traced(tmp_path / "trace", [sys.executable, "-c", code]),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert output == f"got {int(number)}\n"
    assert process.returncode == 40 + number


COUNTS = """
import signal, sys, time
heard = []
signal.signal(signal.SIGHUP, lambda n, f: heard.append(n))
def stop(n, f):
    print("heard", len(heard), flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("to_launcher", [False, True])
def test_a_signal_to_the_whole_group_reaches_the_job_once(
    tmp_path: Path, to_launcher: bool
) -> None:
    """As `timeout` sends it: to its child, then to its process group."""
    process = start(
        traced(tmp_path / "trace", [sys.executable, "-c", COUNTS]),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if to_launcher:
        process.send_signal(signal.SIGSTOP)  # both are pending when it looks
        process.send_signal(signal.SIGHUP)
    os.killpg(process.pid, signal.SIGHUP)
    process.send_signal(signal.SIGCONT)
    # Of signals that are pending, the launcher takes that with the smallest number first.
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == ("heard 1\n", 5)


def test_a_job_killed_by_a_signal_gives_128_plus_n(tmp_path: Path) -> None:
    job = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert run(traced(tmp_path / "trace", job), cwd=tmp_path).status == 137


def started(trace: Path, until: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A traced job of two ranks that ends only when it is ended, and its lines so far.

    Args:
        trace: Its trace.
        until: How the line begins that is waited for.
    """
    process = start(
        traced(trace, torchrun("hang_after.py")), cwd=trace.parent, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(until):
            break
    return process, lines


def test_a_killed_rank_loses_at_most_a_second(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    process, lines = started(trace, until="rank 1 step 150 ")
    pid = next(info.pid for info in read_run(trace).ranks if info.rank == 1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_ns = time.monotonic_ns()
    output, errors = process.communicate(timeout=100)
    assert process.returncode not in (0, None)
    assert "rank 1 ended without closing its trace" in errors
    info = read_run(trace)
    assert info.status == "partial"
    rank_1 = next(r for r in info.ranks if r.rank == 1)
    assert rank_1.status == "killed"
    table, lost = read_last_rows(trace, rank_1.segment)
    assert lost == 0
    # Rank 1 printed how far it came; what it did a second before its end must be in the trace.
    printed = re.findall(r"rank 1 step (\d+) at (\d+)", "".join(lines) + output)
    sure = max(int(s) for s, at in printed if int(at) < killed_ns - 1_000_000_000)
    frame = table.to_pandas()
    assert frame[frame.kind == "phase"].groupby("name").size()["optimizer"] >= sure + 1


def test_a_trace_that_still_runs_can_be_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    process, _ = started(trace, until="rank 0 step 100 ")
    info = read_run(trace)
    assert {r.rank for r in info.ranks} == {0, 1}
    for rank in info.ranks:
        # The writer is a moment behind the job.
        while read_last_rows(trace, rank.segment)[0].num_rows <= 100:
            assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert len(read_run(trace).ranks) == 2


@pytest.mark.long
def test_a_job_outlives_its_launcher_and_the_trace_says_so(tmp_path: Path) -> None:
    command = torchrun("ddp_cnn.py", "40")
    plain = run(command, cwd=tmp_path)
    trace = tmp_path / "trace"
    process = start(traced(trace, command), cwd=tmp_path)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.kill()
    # To the end of the last process that holds the pipe: the job's. What was read ahead with the
    # first line comes only from here.
    rest = process.stdout.read()
    assert process.wait(100) == -signal.SIGKILL
    assert Done(0, first + rest, "").losses() == plain.losses()
    for _ in range(2):  # reading changes nothing
        info = read_run(trace)
        assert info.status == "partial"
        assert info.notes == [
            "the launcher was killed or could not write: it is unknown how the job ended"
        ]
        assert [(r.rank, r.status) for r in info.ranks] == [(0, "complete"), (1, "complete")]
        report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
        assert report.status == 0, report.stderr
        assert "the launcher was killed" in report.stdout


def test_a_launcher_and_its_job_killed_at_once_leave_a_marked_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    process = start(traced(trace, torchrun("hang_after.py")), cwd=tmp_path, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("rank 0 step 400 "):
            break
    # The agent puts each rank into a session of its own.
    ranks = [info.pid for info in read_run(trace).ranks]
    os.killpg(process.pid, signal.SIGKILL)
    for pid in ranks:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=100)
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.status == 0, report.stderr
    assert (
        "the launcher was killed or could not write: it is unknown how the job ended"
        in report.stdout
    )
    for info in read_run(trace).ranks:
        table, lost = read_last_rows(trace, info.segment)
        assert lost == 0
        assert table["name"].to_pylist().count("optimizer") > 50


@pytest.mark.long
def test_a_folder_full_of_the_same_names_is_no_trap(tmp_path: Path) -> None:
    """The job's own modules win inside the job, the tracer's inside the tracer."""
    (tmp_path / "tracer.py").write_text("OWN = 'tracer'\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins\nbuiltins.own_sitecustomize = True\n"
    )
    for package in ("analyzer", "dashboard", "experiments"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"OWN = '{package}'\n")
    job = (JOBS / "ddp_cnn.py").read_text()
    job = (
        "import analyzer, dashboard, experiments, tracer\n"
        "assert own_sitecustomize\n"
        "names = [m.OWN for m in (analyzer, dashboard, experiments, tracer)]\n"
        "assert names == ['analyzer', 'dashboard', 'experiments', 'tracer'], names\n" + job
    )
    (tmp_path / "train.py").write_text(job)
    trace = tmp_path / "trace"
    done = run(
        traced(trace, on_ranks(tmp_path / "train.py", "2")), cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert done.status == 0, done.stderr
    assert read_run(trace).status == "complete"


def test_doctor_traces_a_probe(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "ddltrace", "doctor"], cwd=tmp_path)
    assert done.status == 0, done.stdout
    assert "a probe job was traced" in done.stdout
    missing = run([sys.executable, "-m", "ddltrace", "doctor", "--python", "nope"], cwd=tmp_path)
    assert missing.status == 2
    assert missing.stderr.strip() == "ddltrace: no such interpreter: nope"


@pytest.mark.long
def test_descriptors_that_the_job_closes_are_not_written_to(tmp_path: Path) -> None:
    """All files, ours among them: those that the job opens next get their numbers."""
    (tmp_path / "job.py").write_text(CLOSES)
    done = run(traced(tmp_path / "tr\udce4ce", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert sorted(path.read_text() for path in tmp_path.glob("mine*")) == ["x"] * 16
    read = read_run(tmp_path / "tr\udce4ce")
    assert read.status == "complete"
    for info in read.ranks:
        table, lost = read_last_rows(tmp_path / "tr\udce4ce", info.segment)
        assert (lost, table["op"].to_pylist().count("all_reduce")) == (0, 30)


CLOSES = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for number in range(30):
    dist.all_reduce(torch.ones(3))
    time.sleep(0.05)
    if number == 9:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            path = os.path.realpath(f"/proc/self/fd/{descriptor}")
            if descriptor > 2 and os.path.isfile(path):
                os.close(descriptor)
        mine = [open(f"mine{dist.get_rank()}-{i}", "w") for i in range(8)]
for file in mine:
    file.write("x")
    file.close()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_command_may_end_before_its_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "job.py").write_text(OUTLASTS)
    (tmp_path / "start.sh").write_text(
        f"{shlex.join(torchrun(tmp_path / 'job.py'))} > out.txt 2>&1 &\n"
        "until [ -e began ]; do sleep 0.1; done\n"
    )
    done = run(traced(trace, ["sh", str(tmp_path / "start.sh")]), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "still runs and is recorded" in done.stderr
    assert read_run(trace).status == "running"
    (tmp_path / "end").touch()
    deadline = time.monotonic() + 100
    while read_run(trace).status == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (read_run(trace).status, read_run(trace).notes) == ("complete", [])
    for info in read_run(trace).ranks:
        table, lost = read_last_rows(trace, info.segment)
        assert lost == 0
        assert set(table.filter(pc.equal(table["kind"], "message"))["status"].to_pylist()) == {"ok"}


OUTLASTS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
over = torch.zeros(1)
while not over:
    over.fill_(os.path.exists("end"))
    dist.all_reduce(over)
    time.sleep(0.02)
    open("began", "w").close()
dist.destroy_process_group()
"""


def test_a_job_that_becomes_a_daemon_before_it_records(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, time\n"
        "if os.fork():\n    os._exit(0)\n"
        "os.setsid()\n"
        "while not os.path.exists('go-on'):\n    time.sleep(0.01)\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
    )
    trace = tmp_path / "trace"
    command = traced(trace, ["sh", "-c", f"{sys.executable} job.py > out.txt 2>&1"])
    done = run(command, cwd=tmp_path, **ONE_RANK)
    assert done.status == 0, done.stderr
    assert "still runs and is recorded if it joins a process group" in done.stderr
    (tmp_path / "go-on").touch()
    deadline = time.monotonic() + 100
    while read_run(trace).status == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (read_run(trace).status, read_run(trace).notes) == ("complete", [])


def test_a_command_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", ["no-such-command"]), cwd=tmp_path)
    assert done.status == 2
    assert "command not found" in done.stderr
    assert not (tmp_path / "trace").exists()


def test_events_that_are_gone_are_missed(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", on_ranks("fails.py", "0")), cwd=tmp_path)
    assert "Traceback" not in done.stderr
    (file,) = (tmp_path / "trace").glob("rank-00001-*.arrow")
    file.unlink()
    read = read_run(tmp_path / "trace")
    assert read.status == "partial"
    assert any("rank 1" in note and "is gone" in note for note in read.notes)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_a_job_that_may_not_write_to_the_trace_says_so(tmp_path: Path) -> None:
    trace, nobody = tmp_path / "trace", 65534
    without = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    job = shlex.join([*without, sys.executable, str(JOBS / "fails.py")])
    done = run(
        traced(trace, ["sh", "-c", f"chown {nobody} {shlex.quote(str(trace))} && exec {job}"]),
        cwd=tmp_path,
        **ONE_RANK,
    )
    assert done.status == 0, done.stderr
    assert "nothing was recorded" in done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
