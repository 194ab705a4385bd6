"""``ddltrace run --strategy`` on jobs that know nothing of strategies."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, JOBS, Done, at_once, on_ranks, run, torchrun, traced
from support.sampling import sampled

from ddltrace.analyzer.open_trace import open_trace

LOSSLESS = [
    "fifo",
    "wfbp",
    "wfbp:wait=layer",
    "fusion:cycle_ms=1",
    "bytescheduler:partition_mb=0.0001,credit_mb=0.001",
    "tictac",
    "mgwfbp:steps=3",
]


def trained(directory: Path, spec: str | None, *options: str) -> list[object]:
    """What both ranks of the job found: losses, norms and checkpoints to the last bit."""
    directory.mkdir()
    command = on_ranks("under_strategy.py", str(directory / "found"))
    if spec is not None:
        command = traced(directory / "trace", command, "--strategy", spec, *options)
    done = run(command, cwd=directory, timeout=150)
    assert done.status == 0, done.stderr[-3000:]
    return [json.loads((directory / f"found.{rank}").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return trained(tmp_path_factory.mktemp("plain") / "job", None)


@pytest.mark.long
def test_slices_by_priority_train_to_plain_ddps_bits(plain: list[object], tmp_path: Path) -> None:
    slow = "rank=1,factor=1.5,burst=1,every=2"
    assert trained(tmp_path / "job", "p3:slice=50", "--slow", slow) == plain
    trace = open_trace(tmp_path / "job" / "trace")
    # Every other of the 20 steps of the job's first model waits, on rank 1 only.
    waits = [
        sum(
            "slowed by --slow" in str(name)
            for name in trace.events(rank).column("name").to_pylist()
        )
        for rank in (0, 1)
    ]
    assert waits == [0, 10]
    # Slices and their priorities can be read in the trace.
    table = trace.events(0)
    names = {str(name) for name in table.column("name").to_pylist()}
    assert any("embedding.weight[0:50] priority 0" in name for name in names), names
    assert any(name.startswith("before ") for name in names)


def test_a_lossless_strategy_trains_to_plain_ddps_bits(plain: list[object], tmp_path: Path) -> None:
    seed = int(os.environ.get("STRATEGY_SEED", random.SystemRandom().randrange(1 << 30)))
    spec = random.Random(seed).choice(LOSSLESS)
    print(f"STRATEGY_SEED={seed}: {spec}")
    assert trained(tmp_path / "job", spec) == plain


@pytest.mark.long
@pytest.mark.parametrize("script", sampled(["with_lightning.py", "with_transformers.py"], 1))
def test_frameworks_train_to_the_same_losses(script: str, tmp_path: Path) -> None:
    pytest.importorskip(script.removesuffix(".py").removeprefix("with_"))
    starts_ranks = "lightning" in script
    command = [sys.executable, str(JOBS / script)] if starts_ranks else torchrun(script)
    under_strategy = traced(tmp_path / "trace", command, "--strategy", "p3:slice=100")
    plain, done = at_once(
        lambda: run(command, cwd=tmp_path, timeout=240),
        lambda: run(under_strategy, cwd=tmp_path, timeout=240),
    )
    assert (plain.status, done.status) == (0, 0), done.stderr[-3000:]
    assert done.losses() == plain.losses()
    assert done.losses()


@pytest.mark.long
def test_two_models_exchange_beside_each_other(tmp_path: Path) -> None:
    """Collectives of one must not meet those of the other, in whichever order they start."""

    def trained_by(spec: str | None) -> list[str]:
        found = tmp_path / f"{spec}"
        command = on_ranks("two_models.py", str(found))
        if spec is not None:
            command = traced(tmp_path / f"trace of {spec}", command, "--strategy", spec)
        done = run(command, cwd=tmp_path, timeout=150)
        assert done.status == 0, (spec, done.stderr[-3000:])
        return [Path(f"{found}.{rank}").read_text() for rank in (0, 1)]

    plain = trained_by(None)
    assert trained_by("wfbp") == plain
    for spec in ("doublesqueeze", "localsgd:period=2"):
        lossy = trained_by(spec)
        assert lossy[0] == lossy[1] != plain[0]


def test_what_cannot_be_applied_ends_the_job_with_one_line(tmp_path: Path) -> None:
    command = on_ranks("not_for_strategies.py", "hook", ranks=2)
    done = run(traced(tmp_path / "t", command, "--strategy", "ddp"), cwd=tmp_path)
    reported = [line for line in done.stderr.splitlines() if "cannot be applied" in line]
    assert done.status == 1
    assert len(reported) == 1, done.stderr[-3000:]
    assert reported[0].startswith("ddltrace: strategy ddp cannot be applied: ")
    assert "communication hook of its own" in reported[0]
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout


NOT_APPLIED = {
    "none": "no model in DistributedDataParallel",
    "fsdp1": "shards its model with FSDP; strategies apply to DistributedDataParallel",
    "fsdp": "shards its parameters with FSDP",
    "tensor": "tensor parallelism; strategies apply to DistributedDataParallel",
    "hook": "communication hook of its own (register_comm_hook)",
    "built-in hook": "communication hook of its own (_register_builtin_comm_hook)",
    "delay": "delay_all_reduce_named_params=",
    "mixed": "mixed_precision=",
    "join": "DistributedDataParallel.join()",
    "replicate": "replicate(), which hides the layers",
    "lbfgs": "LBFGS updates all parameters together",
    "former": "trains with a wrapper of its model in which the strategy has ended",
}


def test_each_reason_is_told_before_the_first_step(tmp_path: Path) -> None:
    command = on_ranks("not_for_strategies.py", *NOT_APPLIED, ranks=1)
    done = run(traced(tmp_path / "t", command, "--strategy", "p3"), cwd=tmp_path)
    reported = [line for line in done.stderr.splitlines() if "cannot be applied" in line]
    assert len(reported) == len(NOT_APPLIED), done.stderr[-3000:]
    for line, says in zip(reported, NOT_APPLIED.values(), strict=True):
        assert line.startswith("ddltrace: strategy p3 cannot be applied: ")
        assert says in line
    assert done.stdout.splitlines() == [f"ended with 1: {case}" for case in NOT_APPLIED]


@pytest.mark.long
def test_steps_end_the_job(tmp_path: Path) -> None:
    command = on_ranks("under_strategy.py", str(tmp_path / "found"))
    done: Done = run(traced(tmp_path / "t", command, "--steps", "5"), cwd=tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    assert not (tmp_path / "found.0").exists()
    assert open_trace(tmp_path / "t").analyze().to_json()["trace"]["steps"] == 5


@pytest.mark.parametrize("options", [(), ("--strategy", "wfbp")])
@pytest.mark.long
def test_a_gan_ends_after_as_many_steps_as_its_trace_has(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(traced(tmp_path / "t", on_ranks("gan.py"), "--steps", "11", *options), cwd=tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    assert open_trace(tmp_path / "t").analyze().to_json()["trace"]["steps"] == 11


@pytest.mark.long
def test_an_experiment_with_a_gan_counts_the_steps_of_its_traces(tmp_path: Path) -> None:
    command = [*DDLTRACE, "experiment", "run", "--json", "--steps", "12", "--warmup", "4"]
    command += ["--strategy", "ddp", "--repeats", "1", "-o", "out", "--max-other-cores", "99"]
    done = run([*command, "--", *on_ranks("gan.py")], cwd=tmp_path, timeout=280)
    assert done.status == 0, done.stderr[-3000:]
    for row in json.loads(done.stdout)["rows"]:
        assert len(row["step_us"]) == 12 - 4
        assert len(row["losses"]) == 12


def test_a_wrong_spec_starts_no_job(tmp_path: Path) -> None:
    done = run([*DDLTRACE, "run", "--strategy", "p9", "--", "touch", "started"], cwd=tmp_path)
    assert done.status == 2
    assert "there is no 'p9'" in done.stderr
    assert list(tmp_path.iterdir()) == []
