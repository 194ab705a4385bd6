"""What a report says would test its findings: the commands run as they are printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support.jobs import on_ranks, run, traced

import ddltrace
from ddltrace.analyzer.findings import advice
from ddltrace.analyzer.measures.finding import Finding

STEPS = 30
FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Finding, ...]]:
    folder = tmp_path_factory.mktemp("advice")
    done = run(traced(folder / "a trace", on_ranks("ddp_cnn.py", str(STEPS))), cwd=folder)
    assert done.status == 0, done.stderr
    return folder, ddltrace.open(folder / "a trace").analyze().findings


def in_shell(command: str, folder: Path) -> str:
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run(["sh", "-c", command], cwd=folder, timeout=280, PATH=tools)
    assert done.status == 0, done.stderr
    return done.stdout


def test_every_finding_has_a_number_its_evidence_and_a_test(
    findings: tuple[Path, tuple[Finding, ...]],
) -> None:
    assert findings[1]
    for finding in findings[1]:
        # A finding from the machine's counters has no saving that a replay could bound.
        assert finding.saves_us > 0 or finding.kind in {"memory", "device", "processors", "stopped"}
        assert any(letter.isdigit() for letter in finding.evidence)
        assert finding.command is not None


@pytest.mark.long
def test_the_job_is_recorded_again_and_compared(
    findings: tuple[Path, tuple[Finding, ...]],
) -> None:
    folder, found = findings
    command = next(finding.command for finding in found if finding.is_of_job)
    assert command is not None
    assert "A step, and on its critical path" in in_shell(command, folder)
    again = ddltrace.open(folder / "after").analyze()
    assert again.trace.world_size == 2
    assert again.trace.steps == STEPS


def test_a_trace_of_another_tool_is_compared_with_the_next_one(tmp_path: Path) -> None:
    before = tmp_path / "a profile"
    shutil.copytree(FOREIGN / "kineto-cpu", before)
    found = ddltrace.open(before).analyze().findings
    assert {finding.kind for finding in found} == {"host", "compute", "data"}
    [command] = {finding.command for finding in found}
    assert command is not None
    report = " ".join(
        in_shell(f"ddltrace analyze {shlex.quote(str(before))} --full", tmp_path).split()
    )
    assert f"record it again into 'after' as this trace was recorded: {command}" in report
    shutil.copytree(before, tmp_path / "after")
    assert "A step, and on its critical path" in in_shell(command, tmp_path)


@pytest.mark.long
def test_the_job_runs_under_the_strategies_that_are_advised(
    findings: tuple[Path, tuple[Finding, ...]],
) -> None:
    folder, _ = findings
    analysis = ddltrace.open(folder / "a trace").analyze()
    command = advice.experiment_command(analysis, ("fusion",))
    assert command is not None
    strategies, _, job = command.partition(" -- ")
    assert shlex.split(job) == list(analysis.trace.command)
    table = in_shell(f"{strategies} --steps 8 --warmup 2 -o experiment -- {job}", folder)
    for row in ("unchanged", "fusion"):
        assert row in table
