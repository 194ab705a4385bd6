"""The command line of a run: what stands where, and what is refused before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddltrace.experiments.harness.job_command import check_own_command, job_command
from ddltrace.experiments.harness.run_plan import plan_runs
from ddltrace.experiments.harness.settings import Settings
from ddltrace.tracer.errors import UsageError

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


def test_on_hosts_the_networks_launcher_stands_before_the_script() -> None:
    settings = replace(OWN, command=["python", "t.py"], hosts=4, bandwidth="1gbit", ranks=4)
    command = job_command(plan_runs(settings)[0], settings, Path("out"))
    launch = [sys.executable, "-m", "ddltrace.experiments.network.launch"]
    assert command[command.index("--") + 1 :] == [
        *launch,
        *("--hosts", "4", "--bandwidth", "1gbit", "--", "python", "t.py"),
    ]


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "torch.distributed.run", "t.py"],
        [str(Path(sys.executable).with_name("torchrun")), "t.py"],
    ],
)
def test_on_hosts_a_launcher_of_ranks_is_refused(command: list[str]) -> None:
    check_own_command(command, on_hosts=False)
    with pytest.raises(UsageError, match="in place of torchrun"):
        check_own_command(command, on_hosts=True)


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no program 'no-such-program'"):
        check_own_command(["no-such-program"], on_hosts=False)
