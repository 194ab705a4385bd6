"""Strategies of FSDP on an unchanged job that calls fully_shard."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, on_ranks, run, torchrun

from ddltrace.analyzer.open_trace import open_trace

JOB = Path(__file__).parent / "jobs" / "sharded_job.py"
CHANGES = (
    *("fsdp:prefetch=2", "fsdp:reduce=bf16", "fsdp:reduce=fp8", "fsdp:reduce=int8,gather=int8"),
    *("qgz", "qwz"),
)


def losses_of(path: Path) -> list[float]:
    return [float.fromhex(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], Path]:
    folder = tmp_path_factory.mktemp("sharded")
    done = run(on_ranks(JOB, "plain", ranks=2), cwd=folder)
    assert done.status == 0, done.stderr
    found = {"plain": losses_of(folder / "plain")}
    for number, spec in enumerate(CHANGES):
        command = [*DDLTRACE, "run", "-o", f"trace-{number}", "--level", "comm", "--strategy", spec]
        done = run([*command, "--", *on_ranks(JOB, str(number), ranks=2)], cwd=folder)
        assert done.status == 0, (spec, done.stderr)
        found[spec] = losses_of(folder / str(number))
    return found, folder


@pytest.mark.long
def test_prefetching_changes_no_bit(ran: tuple[dict[str, list[float]], Path]) -> None:
    assert ran[0]["fsdp:prefetch=2"] == ran[0]["plain"]


@pytest.mark.long
def test_encoded_messages_train_nearly_as_well(ran: tuple[dict[str, list[float]], Path]) -> None:
    plain = ran[0]["plain"]
    assert plain[-1] < 0.7 * plain[0]
    for spec in CHANGES[1:]:
        losses = ran[0][spec]
        assert losses != plain, spec  # it did something
        assert losses[-1] == pytest.approx(plain[-1], rel=0.1), spec


def test_messages_are_what_the_strategy_says(ran: tuple[dict[str, list[float]], Path]) -> None:
    def sent(spec: str) -> dict[str, Counter[str]]:
        trace = open_trace(ran[1] / f"trace-{CHANGES.index(spec)}")
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for row in trace.events(0).to_pylist():
            if row["kind"] == "message" and row["step"] == 5:
                count[row["op"]] += 1
                size[row["op"]] += row["bytes"] or 0
        return {"count": count, "bytes": size}

    plain, reduced, both = sent(CHANGES[0]), sent("fsdp:reduce=fp8"), sent(CHANGES[3])
    assert plain["count"]["all_to_all"] == 0
    assert reduced["count"]["reduce_scatter"] == both["count"]["reduce_scatter"] == 0
    assert reduced["count"]["all_to_all"] == plain["count"]["reduce_scatter"] == 4
    # 8 bits an element and 4 bytes a block of 256; blocks of each rank's part.
    whole = plain["bytes"]["reduce_scatter"]
    assert 0.25 * whole <= reduced["bytes"]["all_to_all"] <= 0.27 * whole
    gathered = plain["bytes"]["all_gather"]
    assert both["count"]["all_gather"] == plain["count"]["all_gather"]
    assert 0.25 * gathered <= both["bytes"]["all_gather"] <= 0.27 * gathered


@pytest.mark.long
def test_a_job_without_fully_shard_ends_with_a_line(tmp_path: Path) -> None:
    command = [*DDLTRACE, "run", "-o", "trace", "--strategy", "fsdp:reduce=int8", "--"]
    done = run([*command, *torchrun("ddp_cnn.py")], cwd=tmp_path)
    assert done.status != 0
    assert "strategy fsdp:reduce=int8 cannot be applied: the job has no model in fully_shard" in (
        done.stderr
    )


def test_fsdp_alone_changes_nothing_of_a_job(tmp_path: Path) -> None:
    command = [*DDLTRACE, "run", "-o", "trace", "--strategy", "fsdp", "--"]
    done = run([*command, *torchrun("ddp_cnn.py")], cwd=tmp_path)
    assert done.status == 2
    assert "only built-in workloads can be split" in done.stderr


def test_parameters_are_in_the_list(tmp_path: Path) -> None:
    done = run([*DDLTRACE, "experiment", "list", "--json"], cwd=tmp_path)
    listed = json.loads(done.stdout)
    (fsdp,) = [each for each in listed["techniques"] if each["name"] == "fsdp"]
    assert set(fsdp["parameters"]) == {"reduce", "gather", "prefetch", "ranks_per_host"}
    assert {"qwz", "qgz", "muloco"} <= {each["name"] for each in listed["presets"]}


@pytest.mark.long
def test_an_experiment_names_the_reason_of_a_refusal(tmp_path: Path) -> None:
    command = [*DDLTRACE, "experiment", "run", "--strategy", "bf16", "--steps", "6"]
    command += ["--repeats", "1", "--max-other-cores", "1000", "-o", "out", "--"]
    done = run([*command, *torchrun(JOB, "losses")], cwd=tmp_path)
    assert done.status == 1
    assert (
        "bf16 failed: the job ended with exit status 1: ddltrace: strategy bf16 cannot be applied: "
        in (" ".join(done.stdout.split()))
    )
