"""Splits of a model train as data parallelism does, and their messages are in the trace."""

from __future__ import annotations

import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.jobs import DDLTRACE, LAUNCH_RANKS, environment

from ddltrace.analyzer.open_trace import open_trace

JOB = Path(__file__).parent / "jobs" / "parallelism_job.py"
SPLITS = [
    *("gpt:tensor", "gpt:gpipe:microbatches=2", "gpt:1f1b:microbatches=4"),
    *("gpt:zero", "gpt:fsdp", "moe:expert"),
]
STEPS, BLOCKS, ROW_BYTES = 4, 2, 8 * 4


def train(directory: Path, ranks: int, splits: list[str]) -> dict[str, Any]:
    """Trains a small model with every split; the trace is in ``trace``."""
    output = directory / "report.json"
    launch = [DDLTRACE[0], str(LAUNCH_RANKS), str(ranks), str(JOB), str(output), *splits]
    done = subprocess.run(
        [*DDLTRACE, "run", "-o", str(directory / "trace"), "--", *launch],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(output.read_text())
    assert list(report) == splits
    return report


def sent_by_all_to_alls(trace: Path, ranks: int) -> npt.NDArray[np.int64]:
    """Bytes from each rank to each rank in all-to-alls whose calls gave them."""
    opened = open_trace(trace)
    sizes = [opened.events(rank)["split_bytes"].drop_null().to_pylist() for rank in range(ranks)]
    return np.array([np.sum(each, axis=0) for each in sizes])


@pytest.mark.long
def test_every_split_has_the_losses_of_data_parallelism(tmp_path: Path) -> None:
    for split, found in train(tmp_path, 2, SPLITS).items():
        assert found["losses"] < 1e-5, split
        # AdamW divides by the root of a gradient's square: what rounds to zero may take a step.
        assert found["parameters"] < 4 * 0.002 + 1e-6, split
    events = open_trace(tmp_path / "trace").events(0)
    operations = set(events["op"].cast("string").drop_null().to_pylist())
    assert {"all_reduce", "all_to_all", "all_gather", "reduce_scatter", "send"} <= operations


@pytest.mark.long
def test_tokens_travel_inside_hosts_and_between_them(tmp_path: Path) -> None:
    """Four ranks, one expert each: what the router knows, and what the messages say of it."""
    (tmp_path / "direct").mkdir()
    (tmp_path / "hosts").mkdir()
    found = train(tmp_path / "direct", 4, ["moe:expert", "moe:expert:capacity=4"])
    direct, roomy = found.values()
    by_hosts = "moe:expert:exchange=hierarchical,ranks_per_host="
    two = train(tmp_path / "hosts", 4, [f"{by_hosts}2"])[f"{by_hosts}2"]

    tokens = np.array(direct["findings"]["experts"]["tokens"])
    assert tokens.shape == (BLOCKS, 4, 4)
    assert len(np.unique(tokens.sum((0, 2)))) == 1  # all ranks have as many
    assert two["findings"] == direct["findings"] == roomy["findings"]
    assert two["digest"] == direct["digest"] == roomy["digest"]
    assert two["losses"] == direct["losses"] < 1e-5

    # There and back, and the gradients back and there; both splits of the trace are the same.
    there = tokens.sum(0) * ROW_BYTES
    expected = 2 * (there + there.T)
    np.testing.assert_array_equal(
        sent_by_all_to_alls(tmp_path / "direct" / "trace", 4), 2 * expected
    )

    # Of the others nothing crosses between hosts but one message for each pair of them.
    hosts = np.array([0, 0, 1, 1])
    opened = open_trace(tmp_path / "hosts" / "trace")
    sends = [
        (rank, row["peer"], row["bytes"])
        for rank in range(4)
        for row in opened.events(rank).select(["op", "peer", "bytes", "status"]).to_pylist()
        if row["op"] == "send" and row["status"] == "ok"
    ]
    assert len(sends) == 2 * (4 * BLOCKS * STEPS)
    assert {(hosts[src], hosts[dst]) for src, dst, _ in sends} == {(0, 1), (1, 0)}
    for src, dst in ((0, 1), (1, 0)):
        crossing = [size for one, other, size in sends if hosts[one] == src and hosts[other] == dst]
        pairs = product(np.flatnonzero(hosts == src), np.flatnonzero(hosts == dst))
        assert sum(crossing) == sum(expected[pair] for pair in pairs)
    inside = opened.analyze().all_to_all
    assert {row.ranks for row in inside} == {(0, 1), (2, 3)}


@pytest.mark.long
def test_tokens_over_capacity_pass_by_the_experts(tmp_path: Path) -> None:
    by_hosts = "moe:expert:exchange=hierarchical,ranks_per_host="
    splits = ["moe:expert:capacity=0.5", f"{by_hosts}3,capacity=0.5", "moe:expert"]
    tight, uneven, unbounded = train(tmp_path, 4, splits).values()
    assert uneven["digest"] == tight["digest"] != unbounded["digest"]
    experts = tight["findings"]["experts"]
    tokens, dropped = np.array(experts["tokens"]), np.array(experts["dropped"])
    assert experts["dropped_share"] == pytest.approx(dropped.sum() / tokens.sum())
    # A rank has as many tokens in every step, and an expert takes at most an eighth of them.
    most = STEPS * np.ceil(0.5 * tokens[0, 0].sum() / STEPS / 4)
    assert (tokens - dropped).max() <= most
    assert (dropped >= tokens - most).all()
    assert dropped.sum() > 0
    kept = (tokens - dropped).sum(1)
    assert experts["imbalance"] == pytest.approx((kept.max(1) / kept.mean(1)).mean())
    assert unbounded["findings"]["experts"]["dropped_share"] == 0
