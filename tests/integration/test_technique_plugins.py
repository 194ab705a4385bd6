"""A technique of the user's own: loaded from a file, run on two ranks, recorded; errors of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "fp8_codec.py"
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

GOOD = EXAMPLE.read_text(encoding="utf-8")
EVERY_OTHER = """
from dataclasses import dataclass
from ddltrace.experiments.frequency.local_sgd import LocalSgd
from ddltrace.experiments.technique import technique

@technique("frequency", "every_other", "averages every other step")
@dataclass(frozen=True)
class EveryOther(LocalSgd):
    period: int = 2
"""
BROKEN = {
    "axis": (EVERY_OTHER, "cannot bring a technique of the axis frequency, only of volume, order"),
    "syntax": (GOOD.replace("@dataclass(frozen=True)", "@dataclass(frozen=True"), "SyntaxError"),
    "clash": (GOOD.replace('"tensor_fp8"', '"topk"'), "there is a technique 'topk' already"),
    "preset": (GOOD.replace('"tensor_fp8"', '"sparseloco"'), "there is a preset of this name"),
    "no wire_bytes": (GOOD.replace("def wire_bytes", "def other"), "lacks: wire_bytes"),
    "no codec": (GOOD.replace("def codec", "def other"), "lacks: codec"),
    "no _decode": (GOOD.replace("def _decode", "def other"), "_decode"),
    "nothing": ("x = 1\n", "registers no technique"),
    "error": ("\n\n1 / 0\n", "line 3: ZeroDivisionError"),
}

OTHER_AXES = """
from dataclasses import dataclass
import torch
from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.transfers import Ownership, Reduction, Transfer
from ddltrace.experiments.messages.message_plan import MessagePlan, whole
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.experiments.schedules.base import InTurn, Schedule
from ddltrace.experiments.technique import technique

@technique("order", "halves", "two messages")
@dataclass(frozen=True)
class Halves(Schedule):
    def plan(self, gradients):
        middle = len(gradients) // 2
        halves = (gradients[:middle], gradients[middle:])
        return MessagePlan(gradients, [[whole(each) for each in half] for half in halves])

    def dispatcher(self, plan):
        return InTurn(plan)

@technique("optimizer", "still", "no update at all")
@dataclass(frozen=True)
class Still(OptimizerRule):
    def update(self, optimizer, group, parameters):
        pass

@technique("architecture", "first", "the first rank sums")
@dataclass(frozen=True)
class First(Architecture):
    def reduce(self, ranks, elements):
        rounds = tuple((Transfer(each, ranks[0], 0, elements, True),) for each in ranks[1:])
        return Reduction(rounds, (Ownership(0, elements, ranks[0]),))

    def spread(self, ranks, elements):
        return (tuple(Transfer(ranks[0], each, 0, elements, False) for each in ranks[1:]),)
"""


def ddltrace(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddltrace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.long
def test_the_example_runs_on_two_ranks_and_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ddltrace(
        *(
            "experiment",
            "run",
            "--plugin",
            str(EXAMPLE),
            "--strategy",
            "ddp",
            "--strategy",
            "tensor_fp8",
        ),
        *("--steps", "12", "--warmup", "4", "--repeats", "1", "--width", "8", "-o", str(out)),
        *("--max-other-cores", "1000"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((out / "results.json").read_text())
    (record,) = results["settings"]["plugins"]
    assert record["techniques"] == ["tensor_fp8"]
    assert len(record["sha256"]) == 64
    plain, coded = results["rows"]
    assert coded["replicas_identical"]
    # One byte for each element, and a scale for each of the model's 14 tensors.
    assert coded["payload_bytes"] == plain["payload_bytes"] / 4 + 4 * 14
    assert coded["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.2)
    run = json.loads((out / "tensor_fp8" / "run.json").read_text())
    assert run["labels"]["techniques"] == [record]


@pytest.mark.long
def test_schedules_architectures_and_optimizer_rules_are_executed(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(OTHER_AXES, encoding="utf-8")
    specs = ("ddp", "halves", "halves+first", "halves+still")
    done = ddltrace(
        *("experiment", "run", "--plugin", str(file)),
        *(word for spec in specs for word in ("--strategy", spec)),
        *("--steps", "10", "--warmup", "4", "--repeats", "1", "--width", "8", "-o", str(out)),
        *("--max-other-cores", "1000"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, halves, first, still = json.loads((out / "results.json").read_text())["rows"]
    assert halves["messages"] == 2
    assert all(row["replicas_identical"] for row in (halves, first, still))
    assert halves["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert first["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    # Rank 1 sends its gradients once, and rank 0 sends the sum once: for each message.
    assert first["messages"] == 4
    assert still["losses"] != pytest.approx(plain["losses"], rel=1e-4)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_line_before_the_job_starts(case: str, tmp_path: Path) -> None:
    source, message = BROKEN[case]
    file, started = tmp_path / "mine.py", tmp_path / "started"
    file.write_text(source, encoding="utf-8")
    job = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    done = ddltrace("run", "--plugin", str(file), "-o", str(tmp_path / "trace"), "--", *job)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert message in line
    assert "mine.py" in line
    assert not started.exists()


def test_a_missing_plugin_is_one_line() -> None:
    done = ddltrace("experiment", "run", "--plugin", "/no/such.py", "--strategy", "tensor_fp8")
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith("plug-in /no/such.py cannot be read: No such file or directory")


@pytest.mark.long
def test_a_rank_with_another_file_ends_the_job_with_one_line(tmp_path: Path) -> None:
    """As on a second host whose copy is missing or older: rank 1 starts with a changed file."""
    file, job = tmp_path / "mine.py", tmp_path / "job.py"
    file.write_text(GOOD, encoding="utf-8")
    job.write_text(
        "import sys\n"
        f"open({str(file)!r}, 'a').write('# changed')\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('trained')\n",
        encoding="utf-8",
    )
    arguments = ["--plugin", str(file), "--strategy", "tensor_fp8", "-o", str(tmp_path / "trace")]
    done = ddltrace("run", *arguments, "--", *RANKS, str(job))
    assert done.returncode != 0
    assert "trained" not in done.stdout
    assert "is not the one with which the job was started" in done.stderr
    assert "ZeroDivision" not in done.stderr
