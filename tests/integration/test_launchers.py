"""Every way to start a job: restarts, nodes, MPI-like launchers, frameworks, in code."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import (
    DDLTRACE,
    JOBS,
    ONE_RANK,
    Done,
    environment,
    free_port,
    on_ranks,
    run,
    start,
    torchrun,
    traced,
)

import ddltrace
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.run_info import RunInfo
from ddltrace.tracer.trace.run_reader import read_run

FAKE_MPIRUN = """\
#!{python}
# mpirun reduced to what a rank sees of it: its number and their count in the environment
import os, subprocess, sys
count = int(sys.argv[sys.argv.index("-n") + 1])
command = sys.argv[sys.argv.index("-n") + 2:]
names = {{
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpich": ("PMI_RANK", "PMI_SIZE"),
}}[os.environ["STYLE"]]
tasks = []
for rank in range(count):
    own = dict(zip(names, (str(rank), str(count))))
    tasks.append(subprocess.Popen(command, env={{**os.environ, **own}}))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    path = tmp_path / "mpirun"
    path.write_text(FAKE_MPIRUN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def steps_of(trace: Path, rank: int) -> int:
    events = ddltrace.open(trace).events(rank)
    return sum(kind == "step" for kind in events["kind"].to_pylist())


def ranks_and_states(info: RunInfo) -> list[tuple[int, str]]:
    return [(rank.rank, rank.status) for rank in info.ranks]


BOTH_COMPLETE = [(0, "complete"), (1, "complete")]


@pytest.mark.long
def test_each_attempt_of_a_restarted_job_is_a_segment(tmp_path: Path) -> None:
    command = torchrun("restarts.py", str(tmp_path / "store"))
    command.insert(-2, "--max-restarts=1")
    trace = tmp_path / "trace"
    done = run(traced(trace, command), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(trace)
    assert sorted((r.rank, r.attempt) for r in info.ranks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert any("restarted" in note and "0, 1" in note for note in info.notes)
    assert not any("no trace of rank" in note for note in info.notes)
    # Rank 1 took 3 steps in the first attempt and 4 in the second.
    assert steps_of(trace, 1) == 7
    analyzed = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert analyzed.status == 0, analyzed.stderr
    assert "restarted" in analyzed.stdout


@pytest.mark.parametrize("style", ["openmpi", "slurm", "mpich"])
@pytest.mark.long
def test_an_mpirun_below_the_launcher(tmp_path: Path, mpirun: str, style: str) -> None:
    command = [mpirun, "-n", "2", sys.executable, str(JOBS / "mpi_style.py")]
    done = run(
        traced(tmp_path / "trace", command), cwd=tmp_path, STYLE=style, PORT=str(free_port())
    )
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert info.status == "complete"


@pytest.mark.long
def test_launchers_below_an_mpirun_share_a_directory(tmp_path: Path, mpirun: str) -> None:
    trace = tmp_path / "trace"
    job = [sys.executable, str(JOBS / "mpi_style.py")]
    done = run(
        [mpirun, "-n", "2", *traced(trace, job)],
        cwd=tmp_path,
        STYLE="openmpi",
        PORT=str(free_port()),
    )
    assert done.status == 0, done.stderr
    assert "no trace of rank" not in done.stderr
    assert sorted(path.name for path in trace.iterdir()) == ["part-00000", "part-00001", "run.json"]
    info = read_run(trace)
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert (info.status, info.notes) == ("complete", [])
    assert steps_of(trace, 0) == steps_of(trace, 1) == 3
    # All of them had one clock and their messages meet.
    analysis = ddltrace.open(trace).analyze().to_json()
    assert analysis["trace"]["world_size"] == 2
    assert analysis["clock"]["max_residual_us"] == 0

    again = run(
        [mpirun, "-n", "1", *traced(trace, job)],
        cwd=tmp_path,
        STYLE="openmpi",
        PORT=str(free_port()),
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert again.status == 2
    assert "exists" in again.stderr


def run_two_nodes(tmp_path: Path, traces: tuple[Path, Path]) -> list[Done]:
    """Two launchers, each with a torchrun of its own, as on two hosts."""
    port = str(free_port())
    started = []
    for node, trace in enumerate(traces):
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--node-rank", str(node), "--nproc-per-node=1"),
            *("--master-addr=127.0.0.1", "--master-port", port, str(JOBS / "ddp_cnn.py"), "3"),
        ]
        started.append(start(traced(trace, command), cwd=tmp_path, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=120) for process in started]
    return [
        Done(process.returncode, *output) for process, output in zip(started, outputs, strict=True)
    ]


@pytest.mark.long
def test_two_nodes_in_one_shared_directory(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for done in run_two_nodes(tmp_path, (trace, trace)):
        assert done.status == 0, done.stderr
    info = read_run(trace)
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert info.status == "complete"
    merged = run([*DDLTRACE, "merge", str(trace), "-o", str(tmp_path / "one")], cwd=tmp_path)
    assert merged.status == 0, merged.stderr
    assert not list((tmp_path / "one").glob("part-*"))
    for rank in (0, 1):
        assert (
            ddltrace.open(tmp_path / "one").events(rank).equals(ddltrace.open(trace).events(rank))
        )


@pytest.mark.long
def test_two_nodes_with_a_directory_each_are_merged(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for done in run_two_nodes(tmp_path, (here, there)):
        assert done.status == 0, done.stderr
        assert "ddltrace merge" in done.stderr
    assert any("no trace of rank 1 of 2" in note for note in read_run(here).notes)
    merged = run([*DDLTRACE, "merge", "here", "there", "-o", "whole"], cwd=tmp_path)
    assert merged.status == 0, merged.stderr
    info = read_run(tmp_path / "whole")
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert (info.status, info.notes) == ("complete", [])
    assert steps_of(tmp_path / "whole", 1) == 3
    gathered = run([*DDLTRACE, "collect", "here", "there", "gone", "-o", "all"], cwd=tmp_path)
    assert gathered.status == 1  # one directory is missing
    assert "gone is left out" in gathered.stderr
    assert read_run(tmp_path / "all").notes == ["gone could not be collected"]
    assert (
        ddltrace.open(tmp_path / "all")
        .events(1)
        .equals(ddltrace.open(tmp_path / "whole").events(1))
    )
    # Without merging, they are analyzed as the same.
    page = tmp_path / "report.html"
    several = run([*DDLTRACE, "analyze", "here", "there", "--json", "--html", page], cwd=tmp_path)
    single = run([*DDLTRACE, "analyze", "whole", "--json"], cwd=tmp_path)
    assert (several.status, single.status) == (0, 0), several.stderr
    both, one = json.loads(several.stdout), json.loads(single.stdout)
    assert both["trace"].pop("name") == "here+there"
    assert one["trace"].pop("name") == "whole"
    assert both["trace"]["ranks"] == [0, 1]
    assert both["joining"]["complete"] == both["joining"]["collectives"] > 0
    for finding in both["findings"] + one["findings"]:
        finding.pop("command")  # names the trace
    assert both == one
    assert "ddltrace merge here there -o whole &amp;&amp; ddltrace" in page.read_text()
    assert (
        "Next: ddltrace merge here there"
        in run([*DDLTRACE, "analyze", "here", "there"], cwd=tmp_path).stdout
    )
    # What does not belong together is not joined, and nothing is written over.
    twice = run([*DDLTRACE, "merge", "here", "here", "-o", "x"], cwd=tmp_path)
    over = run([*DDLTRACE, "merge", "here", "there", "-o", "whole"], cwd=tmp_path)
    none = run([*DDLTRACE, "merge", "nowhere", "-o", "y"], cwd=tmp_path)
    same = run([*DDLTRACE, "analyze", "here", "there", "here"], cwd=tmp_path)
    no_trace = run([*DDLTRACE, "analyze", "here", "nowhere"], cwd=tmp_path)
    assert (twice.status, over.status, none.status) == (2, 2, 1)
    assert (same.status, no_trace.status) == (2, 1)
    for done in (twice, over, none, same, no_trace):
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").touch()
    (tmp_path / "project" / "train.py").write_text((JOBS / "ddp_cnn.py").read_text())
    torch_run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torch_run, "--nproc-per-node=2", "-m", "project.train", "2"]
    done = run(traced(tmp_path / "trace", command), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert ranks_and_states(read_run(tmp_path / "trace")) == BOTH_COMPLETE


@pytest.mark.long
def test_children_and_helpers_of_a_rank_are_no_ranks(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", torchrun("family.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert (info.status, info.notes) == ("complete", [])
    assert steps_of(tmp_path / "trace", 0) == 3


@pytest.mark.long
def test_a_rank_that_replaces_itself_is_recorded_twice(tmp_path: Path) -> None:
    done = run(
        traced(
            tmp_path / "trace",
            [
                "bash",
                "-c",
                f"for r in 0 1; do RANK=$r {shlex.quote(sys.executable)} "
                f"{shlex.quote(str(JOBS / 'replaces_itself.py'))} & done; wait",
            ],
        ),
        cwd=tmp_path,
        WORLD_SIZE="2",
        STORES=str(tmp_path),
    )
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    assert sorted(rank.rank for rank in info.ranks) == [0, 0, 1, 1]
    assert len({rank.segment for rank in info.ranks}) == 4
    events = ddltrace.open(tmp_path / "trace").events(0).to_pylist()
    assert sum(row["op"] == "all_reduce" for row in events) == 6


def test_a_rank_that_becomes_another_program_after_its_group_is_complete(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(3):\n    dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
        "os.execvp('true', ['true'])\n"
    )
    done = run(
        traced(tmp_path / "trace", [sys.executable, str(tmp_path / "job.py")]),
        cwd=tmp_path,
        **ONE_RANK,
    )
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    assert (info.status, info.notes, info.ranks[0].status) == ("complete", [], "complete")
    events = ddltrace.open(tmp_path / "trace").events(0).to_pylist()
    assert sum(row["op"] == "all_reduce" for row in events) == 3


def test_a_launcher_below_a_launcher_has_the_trace(tmp_path: Path) -> None:
    job = [sys.executable, str(tmp_path / "train.py")]
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    inner = traced(tmp_path / "inner", job)
    done = run(traced(tmp_path / "outer", inner), cwd=tmp_path, **ONE_RANK)
    assert done.status == 0, done.stderr
    told = f"the command is itself a ddltrace run, which records into {tmp_path / 'inner'}"
    assert f"ddltrace: nothing was recorded: {told}\n" in done.stderr
    assert read_run(tmp_path / "inner").status == "complete"
    report = run([*DDLTRACE, "analyze", str(tmp_path / "outer")], cwd=tmp_path)
    assert "itself a ddltrace run" in report.stdout
    assert " -I" not in done.stderr + report.stdout


IN_CODE = """\
import sys
import ddltrace.tracer
assert ddltrace.tracer.install({argument}) is {expected}
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


def test_installed_in_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_CODE.format(argument="'here'", expected=True))
    done = run(on_ranks(tmp_path / "train.py"), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "here")
    assert ranks_and_states(info) == BOTH_COMPLETE
    assert (info.status, info.notes) == ("complete", [])
    rows = ddltrace.open(tmp_path / "here").events(1).to_pylist()
    assert sum(row["op"] == "all_reduce" for row in rows) == 5


@pytest.mark.long
def test_installed_in_code_and_told_where_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_CODE.format(argument="", expected=True))
    done = run(on_ranks(tmp_path / "train.py"), cwd=tmp_path, DDLTRACE_OUTPUT=str(tmp_path / "t"))
    assert done.status == 0, done.stderr
    assert ranks_and_states(read_run(tmp_path / "t")) == BOTH_COMPLETE
    (tmp_path / "train.py").write_text(IN_CODE.format(argument="", expected=False))
    assert run(on_ranks(tmp_path / "train.py"), cwd=tmp_path).status == 0


def test_an_isolated_python_says_what_to_do_and_that_helps(tmp_path: Path) -> None:
    job = [sys.executable, "-I", str(JOBS / "fails.py")]
    done = run(traced(tmp_path / "a", job), cwd=tmp_path, **ONE_RANK)
    assert done.status == 1
    assert "Python was started with -I" in done.stderr
    assert "ddltrace.tracer.install()" in done.stderr
    (tmp_path / "train.py").write_text(
        "import ddltrace.tracer; ddltrace.tracer.install()\n" + (JOBS / "fails.py").read_text()
    )
    job = [sys.executable, "-I", str(tmp_path / "train.py")]
    done = run(traced(tmp_path / "b", job), cwd=tmp_path, **ONE_RANK)
    assert done.status == 0, done.stderr
    assert [r.rank for r in read_run(tmp_path / "b").ranks] == [0]


def test_a_cleaned_environment_is_told(tmp_path: Path) -> None:
    job = ["env", "-i", sys.executable, "-c", "pass"]
    done = run(traced(tmp_path / "trace", job), cwd=tmp_path)
    assert done.status == 1
    assert "env -i clears the environment" in done.stderr


def test_an_interpreter_without_ddltrace_says_how_to_get_it(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    done = run(traced(tmp_path / "trace", [python, "-c", "print('ran')"]), cwd=tmp_path)
    assert done.stdout == "ran\n"
    assert f"`{python} -m pip install ddltrace`" in done.stderr


def on_terminal(command: list[str], cwd: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a command as a shell does: in the foreground of a terminal of its own."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        cwd=cwd,
        env=environment(),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        close_fds=True,
    )
    os.close(follower)
    return process, leader


def lines_of(leader: int) -> Iterator[str]:
    text = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the last process on the terminal has ended
            return
        text += part
        *lines, text = text.split(b"\n")
        yield from (line.decode(errors="replace").strip() for line in lines)


def test_ctrl_c_twice_on_a_terminal(tmp_path: Path) -> None:
    """The job hears each Ctrl-C once, ends as it likes, and the trace is finished."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""\
        import signal, sys, time
        import torch, torch.distributed as dist
        heard = []
        signal.signal(signal.SIGINT, lambda n, f: heard.append(n))
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        assert sys.stdin.isatty()
        print("ready", flush=True)
        while len(heard) < 1: time.sleep(0.01)
        print("once", flush=True)
        while len(heard) < 2: time.sleep(0.01)
        time.sleep(0.3)
        print("heard", len(heard), flush=True)
        sys.exit(5)
        """)
    )
    command = ["env", *(f"{name}={value}" for name, value in ONE_RANK.items())]
    command += traced(tmp_path / "trace", [sys.executable, "train.py"])
    process, leader = on_terminal(command, tmp_path)
    seen = []
    for line in lines_of(leader):
        seen.append(line)
        if line.endswith(("ready", "once")):  # the terminal echoes ^C before it
            os.write(leader, b"\x03")
    assert process.wait(60) == 5
    assert any(line.endswith("heard 2") for line in seen)
    assert any("ddltrace: next: ddltrace analyze" in line for line in seen)
    assert read_run(tmp_path / "trace").exit_status == 5
    os.close(leader)


def test_output_into_a_pipe_that_closes_early(tmp_path: Path) -> None:
    """`ddltrace run ... | head -1`: the trace is finished and named on stderr."""
    job = " ".join(
        map(
            shlex.quote,
            [
                sys.executable,
                "-c",
                (
                    "import torch, torch.distributed as dist; dist.init_process_group('gloo');"
                    "dist.all_reduce(torch.ones(2)); print('one', flush=True); print('two')"
                ),
            ],
        )
    )
    command = " ".join(map(shlex.quote, [*DDLTRACE, "run", "-o", "trace", "--"]))
    done = run(
        ["bash", "-c", f"{command} {job} | head -1"],
        cwd=tmp_path,
        **ONE_RANK,
    )
    assert done.stdout == "one\n"
    assert "ddltrace: trace of 1 rank in trace" in done.stderr
    assert read_run(tmp_path / "trace").ranks[0].status == "complete"


def test_under_timeout_the_job_is_stopped_and_the_trace_finished(tmp_path: Path) -> None:
    """`timeout` sends its signal to the launcher and to its process group, torchrun among it."""
    command = ["timeout", "600", *traced(tmp_path / "t", torchrun("hang_after.py"))]
    process = start(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    awaited = {"rank 0 step 3 ", "rank 1 step 3 "}
    while awaited:
        line = process.stdout.readline()
        assert line, "the job has ended"
        awaited = {text for text in awaited if text not in line}
    process.send_signal(signal.SIGALRM)  # the time is up
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 124
    assert "ddltrace: next: ddltrace analyze" in errors
    assert {rank.rank for rank in read_run(tmp_path / "t").ranks} == {0, 1}


def test_a_helper_that_forms_a_job_of_its_own_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(HELPED)
    done = run(traced(tmp_path / "trace", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert len(read_run(tmp_path / "trace").ranks) == 3
    analysis = open_trace(tmp_path / "trace").analyze()
    assert analysis.joining.collectives == analysis.joining.complete == 21
    assert any("in a job of its own" in note for note in analysis.trace.notes)


HELPED = """
import os, subprocess, sys, torch, torch.distributed as dist
if len(sys.argv) > 1:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    for _ in range(7):
        dist.all_reduce(torch.ones(3))
    sys.exit()
dist.init_process_group("gloo")
for number in range(20):
    dist.all_reduce(torch.ones(8))
    if number == 10 and dist.get_rank() == 1:
        store = os.path.abspath("store")
        subprocess.run([sys.executable, __file__, store], check=True)
dist.barrier()
dist.destroy_process_group()
"""
