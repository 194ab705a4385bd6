"""``ddltrace experiment`` as its user calls it: real ranks, real traces, one table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ddltrace
from ddltrace.experiments.harness.measurement import measure

COMMAND = [sys.executable, "-m", "ddltrace", "experiment"]
SMALL = ["--ranks", "2", "--steps", "24", "--warmup", "8", "--width", "8", "--batch-size", "8"]
SMALL += ["--learning-rate", "0.1", "--repeats", "1", "--max-other-cores", "1000"]
# Of a model of width 8, layer by layer, weights and biases: what the ranks exchange in a step.
GRADIENT_BYTES = 4 * (80 + 584 + 1168 + 2320 + 4640 + 9248 + 1290)
TENSORS = 14


def call(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == status, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A small experiment: its directory, what it printed, and what it said on the side."""
    output = tmp_path_factory.mktemp("experiment") / "out"
    done = call("run", *SMALL, "-o", str(output))
    return output, done.stdout, done.stderr


@pytest.fixture(scope="module")
def rows(ran: tuple[Path, str, str]) -> dict[str, dict[str, Any]]:
    value = json.loads((ran[0] / "results.json").read_text())
    assert value["schema"] == "ddltrace.experiment/1"
    assert value["status"] == "complete"
    return {row["strategy"]: row for row in value["rows"]}


def test_every_strategy_trained_to_the_same_bits(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == ["ddp", "fifo", "wfbp"]
    for row in rows.values():
        assert row["replicas_identical"]
        assert row["losses"] == rows["ddp"]["losses"]
        assert row["train_loss"] == rows["ddp"]["train_loss"]
        assert len(row["losses"]) == 24
        assert row["train_loss"] < row["losses"][0]


def test_every_steady_step_was_measured(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert len(row["step_us"]) == 24 - 8
        assert not row["notes"]
        assert min(row["step_us"]) <= row["step_us_p50"] <= row["step_us_p95"]


def test_messages_and_bytes_are_those_of_the_strategy(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert row["payload_bytes"] == GRADIENT_BYTES
    assert rows["ddp"]["messages"] == 1  # all of it is smaller than the first bucket
    assert rows["fifo"]["messages"] == rows["wfbp"]["messages"] == TENSORS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's struct tcp_info")
def test_the_wire_carries_what_a_ring_needs(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        # 2 (p - 1) / p n with p = 2; above it Gloo's headers, the tracer's exchange of clocks,
        # and what a busy machine lets TCP send again.
        assert row["wire_bytes"] >= GRADIENT_BYTES
        assert row["wire_bytes"] < 1.25 * GRADIENT_BYTES + 1500 * row["messages"]


def launched_early(trace: Path) -> list[int]:
    """How many messages each rank launched before the last gradient was ready, by step."""
    counts = []
    for rank in (0, 1):
        events = ddltrace.open(trace).events(rank).to_pandas()
        ready = events[events.kind == "gradient"].groupby("step").start_ns.max()
        messages = events[(events.kind == "message") & (events.tensors.str.len() > 0)]
        early = messages.enqueue_ns < messages.step.map(ready)
        # The first steps create the order, and the messages' buffers.
        counts += early.groupby(messages.step).sum().loc[8:].tolist()
    assert len(counts) == 2 * (24 - 8)
    return counts


def test_fifo_waits_for_the_backward_pass_and_wait_free_does_not(
    ran: tuple[Path, str, str],
) -> None:
    """The order of launches, not how much of them overlapped, which depends on the load."""
    assert set(launched_early(ran[0] / "fifo")) == {0}
    assert min(launched_early(ran[0] / "wfbp")) > 0


def test_the_table_is_printed_and_the_next_command_named(ran: tuple[Path, str, str]) -> None:
    output, printed, said = ran
    for name in ("ddp", "fifo", "wfbp"):
        assert any(line.startswith(f"{name} ") for line in printed.splitlines())
    assert max(map(len, printed.splitlines())) <= 100
    assert f"ddltrace dashboard {output / 'ddp'} {output / 'fifo'}" in said


def test_compare_prints_the_same_table_again(ran: tuple[Path, str, str]) -> None:
    output, printed, _ = ran
    assert call("compare", str(output)).stdout == printed


def test_compare_measures_bare_traces(
    ran: tuple[Path, str, str], rows: dict[str, dict[str, Any]]
) -> None:
    output = ran[0]
    done = call("compare", str(output / "wfbp"), str(output / "fifo"), "--json")
    value = json.loads(done.stdout)
    assert [row["strategy"] for row in value["rows"]] == ["wfbp", "fifo"]
    assert value["baseline"] == "wfbp"
    for row in value["rows"]:
        assert row["messages"] == rows[row["strategy"]]["messages"]
        assert row["train_loss"] is None


def test_a_training_that_diverged_is_marked(ran: tuple[Path, str, str]) -> None:
    outcome = {"train_loss": float("nan"), "losses": [2.3, float("inf")]}
    row = measure(ran[0] / "fifo", steps=range(8, 24), outcome=outcome)
    assert row.train_loss is None
    assert row.losses == [2.3, None]
    assert row.status == "diverged"
    assert row.reason == "the training diverged: the loss of step 1 is inf"


def test_an_experiment_is_not_overwritten(ran: tuple[Path, str, str], tmp_path: Path) -> None:
    assert "--force" in call("run", *SMALL, "-o", str(ran[0]), status=2).stderr
    (tmp_path / "precious").write_text("x")
    assert "is not an experiment" in call("run", "-o", str(tmp_path), "--force", status=2).stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.long
def test_a_failed_job_is_explained_in_one_line(tmp_path: Path) -> None:
    arguments = [
        "--strategy",
        "fifo",
        "--repeats",
        "1",
        "--batch-size",
        "5000",
        "-o",
        str(tmp_path / "out"),
    ]
    done = call("run", *arguments, status=1)
    message = done.stderr.strip().splitlines()[-1]
    assert "a batch of 5000 is more than one rank's share" in message
    assert "fifo.log" in message
    assert json.loads((tmp_path / "out" / "results.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--strategy", "p9"], "there is no 'p9'"),
        (["--strategy", "fifo", "--strategy", "fifo"], "given twice"),
        (["--hosts", "4"], "belong together"),
        (["--hosts", "4", "--bandwidth", "fast"], "400mbit"),
        (["--hosts", "4", "--ranks", "2", "--bandwidth", "1gbit"], "one rank on each host"),
        (["--steps", "10", "--warmup", "10"], "leaves nothing"),
        (
            ["--workload", "gpt", "--strategy", "odsgd"],
            "AdamW; choose --workload digits",
        ),
        (["--strategy", "backup:workers=2"], "no worker of 2 is left"),
    ],
)
def test_a_bad_call_runs_nothing(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = call("run", *arguments, "-o", str(tmp_path / "out"), status=2)
    assert complaint in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["run", "--strategy", "wfbp", "--steps", "100000", "-o", str(output)]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(output.glob("wfbp/rank-*.json"))) < 2:  # both have said who they are
            assert time.monotonic() < deadline, "the ranks never recorded"
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted by SIGINT" in said
    # The job ended before the command did, and its trace is final.
    ranks = json.loads((output / "wfbp" / "run.json").read_text())["ranks"]
    assert len(ranks) == 2
    assert not any(os.path.exists(f"/proc/{rank['pid']}") for rank in ranks)


NAMES_OTHERS_RELY_ON = {
    *("fifo", "wfbp", "ddp", "poseidon", "mgwfbp", "fusion", "p3", "bytescheduler", "tictac"),
    *("odsgd", "best_buckets", "fp16", "bf16", "int8", "onebit", "signsgd", "qsgd", "ternary"),
    *("topk", "dgc", "randomk", "powersgd", "doublesqueeze", "feedback", "accumulate"),
    *("localsgd", "postlocalsgd", "diloco", "streaming_diloco", "demo", "lars", "lamb"),
    *("fp8", "int4", "thc", "muon", "dion", "noloco"),
}


def test_list_shows_what_exists() -> None:
    techniques = json.loads(call("list", "--json").stdout)["techniques"]
    selectable = {t["name"] for t in techniques if t["selectable"]}
    assert selectable >= NAMES_OTHERS_RELY_ON
    printed = call("list").stdout
    assert all(technique["name"] in printed for technique in techniques)


@pytest.mark.long
@pytest.mark.netns
def test_an_experiment_on_a_shaped_network(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    output = tmp_path / "out"
    network = ["--hosts", "2", "--bandwidth", "100mbit", "--width", "32"]
    network += ["--max-other-cores", "1000"]
    arguments = ["--strategy", "fifo", "--repeats", "1", "--steps", "16", "--warmup", "4", *network]
    done = subprocess.run(
        [*COMMAND, "run", *arguments, "-o", str(output), "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "network cannot be made" in done.stderr or "needs the program" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)["rows"]
    assert row["replicas_identical"]
    # 1,166,248 bytes each way over a link of 100 Mbit/s take 93 ms, and none of it is hidden.
    assert row["exposed_us"] > 0.85 * 93_300


@pytest.mark.long
def test_a_users_own_job_runs_unchanged_and_under_a_strategy(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "examples" / "train_digits.py"
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--strategy", "bf16", "--repeats", "1", "--steps", "14", "--warmup", "4"]
    options += ["-o", str(tmp_path / "out"), "--max-other-cores", "1000"]
    done = call("run", *options, "--json", "--", *job, str(script), "--epochs", "50")
    unchanged, bf16 = json.loads(done.stdout)["rows"]
    assert (unchanged["strategy"], bf16["strategy"]) == ("unchanged", "bf16")
    for row in (unchanged, bf16):
        assert row["status"] == "complete"
        assert len(row["step_us"]) == 14 - 4
        assert len(row["losses"]) == 14
    assert bf16["losses"][0] == unchanged["losses"][0]
    assert bf16["payload_bytes"] == pytest.approx(unchanged["payload_bytes"] / 2, rel=0.01)
