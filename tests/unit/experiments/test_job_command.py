"""The command line of a run: what stands where, and what is refused before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddltrace.experiments.harness.job_command import check_own_command, job_command
from ddltrace.experiments.harness.settings import Settings, plan_runs
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.emulated_hosts import NAMES, on_hosts

OWN = Settings(
    strategies=["unchanged", "bf16+wfbp"],
    ranks=None,
    steps=30,
    warmup=5,
    command=["torchrun", "--nproc-per-node", "2", "train.py"],
)
RECORD = [sys.executable, "-m", "ddltrace", "run", "-o"]


def test_the_own_job_runs_unchanged_and_with_each_strategy() -> None:
    plain, other = (job_command(run, OWN, Path("out")) for run in plan_runs(OWN))
    options = ["--force", "--level", "layer"]
    end = ["--steps", "30", "--", "torchrun", "--nproc-per-node", "2", "train.py"]
    assert plain == [*RECORD, "out/unchanged", *options, *end]
    assert other == [*RECORD, "out/bf16-wfbp", *options, "--strategy", "bf16+wfbp", *end]


@pytest.mark.parametrize(
    ("strategy", "first"),
    [
        ("ddp", 10),
        ("localsgd:period=8", 12),
        ("grouped:size=2,every=6", 12),
        ("diloco:period=25", 10),
        ("streaming_diloco:period=48,fragments=4", 12),
        ("diloco:period=51", 10),  # a cycle does not fit
        ("unchanged", 10),
    ],
)
def test_whole_cycles_of_exchanges_are_measured(strategy: str, first: int) -> None:
    settings = Settings(strategies=[strategy], ranks=2, steps=60, warmup=10, workload="digits")
    assert settings.measured_steps(strategy) == range(first, 60)
    if strategy != "unchanged":
        command = job_command(plan_runs(settings)[0], settings, Path("out"))
        assert command[command.index("--warmup") + 1] == str(first)


def test_on_hosts_the_networks_launcher_stands_before_the_script() -> None:
    command = ["python", "t.py"]
    slow = ["rank=2,factor=1.5"]
    settings = replace(OWN, command=command, hosts=4, bandwidth="1gbit", ranks=4, slow=slow)
    command = job_command(plan_runs(settings)[0], settings, Path("out"))
    assert command[command.index("--slow") : command.index("--slow") + 2] == ["--slow", *slow]
    launch = [sys.executable, "-m", "ddltrace.experiments.network.launch"]
    assert command[command.index("--") + 1 :] == [
        *launch,
        *("--hosts", "4", "--bandwidth", "1gbit", "--", "python", "t.py"),
    ]


TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PYTHON = str(Path(sys.executable).with_name("python"))
HOSTS = {**dict.fromkeys(NAMES), "hosts": 4, "bandwidth": "1gbit"}


@pytest.mark.parametrize(
    ("command", "of_each_rank"),
    [
        (["python", "t.py", "--lr", "1"], ["python", "t.py", "--lr", "1"]),
        (
            [TORCHRUN, "--standalone", "--nproc-per-node", "4", "t.py", "--nnodes", "9"],
            [PYTHON, "-u", "t.py", "--nnodes", "9"],
        ),
        ([TORCHRUN, "--nproc_per_node=auto", "-m", "a.b"], [PYTHON, "-u", "-m", "a.b"]),
        (["python", "-m", "torch.distributed.run", "t.py", "x"], ["python", "-u", "t.py", "x"]),
        (["env", "A=1", TORCHRUN, "t.py"], ["env", "A=1", PYTHON, "-u", "t.py"]),
    ],
)
def test_on_hosts_each_rank_runs_the_script_of_torchrun(
    command: list[str], of_each_rank: list[str]
) -> None:
    own = on_hosts(HOSTS, command)
    assert own[own.index("--") + 1 :] == of_each_rank
    assert on_hosts(dict.fromkeys(NAMES), command) == command


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([TORCHRUN, "--nproc-per-node", "3", "t.py"], "does not fit 4 hosts with 1 rank each"),
        ([TORCHRUN, "--no-python", "t.sh"], "--no-python"),
        ([TORCHRUN], "cannot be read: .*training_script"),
        ([sys.executable, "-m", "torch.distributed.launch", "t.py"], "in place of torch.dist"),
        ([sys.executable, "/bin/accelerate", "launch", "t.py"], "in place of /bin/accelerate"),
    ],
)
def test_what_the_hosts_cannot_start_is_refused(command: list[str], says: str) -> None:
    check_own_command(command, dict.fromkeys(NAMES))
    with pytest.raises(UsageError, match=says):
        check_own_command(command, HOSTS)


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no program 'no-such-program'"):
        check_own_command(["no-such-program"], HOSTS)
