"""Architectures on real ranks: the numbers of DDP, and exactly the formula's messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.jobs import on_ranks, run
from support.jobs import traced as under_tracer
from support.sampling import sampled
from support.traces import read_last_rows

from ddltrace.tracer.trace.run_reader import read_run

JOB = Path(__file__).parent / "jobs" / "architecture_job.py"
ON_THREE = [
    "ring",
    "halving_doubling",
    "tree",
    "double_tree",
    "mesh",
    "hierarchical:ranks_per_host=2",
    "hierarchical:inner=tree,outer=mesh,ranks_per_host=2",
    "ps:sharded=true",
    "ps:servers=2+wfbp",
    "ring+topk:density=0.1+feedback",
    "mesh+topk:density=0.1+feedback",
    "mesh+powersgd+feedback",
    "ring+p3:slice=20",
    "tree+bytescheduler:partition_mb=0.0001,credit_mb=0.0002",
    "ps+randomk:density=0.5",
]
ON_FIVE = sampled(["ring", "halving_doubling", "double_tree", "mesh+wfbp", "ps"], 2)


def train(ranks: int, specs: list[str], folder: Path) -> dict[str, Any]:
    output = folder / "report.json"
    command = on_ranks(JOB, str(output), *specs, ranks=ranks)
    done = run(under_tracer(folder / "trace", command), cwd=folder, timeout=280)
    assert done.status == 0, done.stderr[-4000:]
    value: dict[str, Any] = json.loads(output.read_text())
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def of_three(folder: Path) -> dict[str, Any]:
    return train(3, ON_THREE, folder)


@pytest.mark.parametrize("spec", ON_THREE)
@pytest.mark.long
def test_three_ranks_train_as_with_the_librarys_all_reduce(
    spec: str, of_three: dict[str, Any]
) -> None:
    assert of_three[spec]["distance"] < 1e-6
    assert of_three[spec]["replicas_equal"]


@pytest.mark.long
def test_five_ranks_do_too(tmp_path: Path) -> None:
    report = train(5, ON_FIVE, tmp_path)
    assert list(report) == ON_FIVE
    assert max(row["distance"] for row in report.values()) < 1e-6
    assert all(row["replicas_equal"] for row in report.values())


@pytest.fixture(scope="module")
def traced(of_three: dict[str, Any], folder: Path) -> pd.DataFrame:
    """All sends and receives of three workers and two servers, as the trace has them."""
    assert of_three
    frames = []
    for rank in read_run(folder / "trace").ranks:
        table, _ = read_last_rows(folder / "trace", rank.segment)
        frames.append(table.to_pandas().astype({"name": object}).assign(rank=rank.rank))
    every = pd.concat(frames)
    return every[(every.kind == "message") & every.op.isin(["send", "recv"])]


STEPS, ELEMENTS = 3, 308


def test_a_ring_sends_the_formulas_messages_and_bytes(traced: pd.DataFrame) -> None:
    sends = traced[(traced.op == "send") & (traced.group == "exchange")]
    assert len(sends) == STEPS * 2 * 2 * 3
    assert sends.bytes.sum() == STEPS * 2 * 2 * ELEMENTS * 4
    assert {(r.rank, r.peer) for r in sends.itertuples()} == {(0, 1), (1, 2), (2, 0)}
    assert sends.name.str.contains(r"\[\d+:\d+\]").all()


def test_workers_push_each_key_once_and_pull_it_once(traced: pd.DataFrame) -> None:
    messages = traced[traced.group == "parameter server"]
    assert set(messages["rank"]) == {0, 1, 2, 3, 4}
    sends = messages[messages.op == "send"]
    pushes, pulls = sends[sends["rank"] < 3], sends[sends["rank"] >= 3]
    assert pushes.bytes.sum() == pulls.bytes.sum() == STEPS * 3 * ELEMENTS * 4
    assert len(pushes) == len(pulls)
    assert len(pushes) % (STEPS * 3) == 0
    loads = pushes.groupby("peer").bytes.sum()
    assert set(loads.index) == {3, 4}
    # So small a model is not worth a message more: each of the six tensors goes whole.
    assert len(pushes) == STEPS * 3 * 6
    receives = messages[messages.op == "recv"]
    assert len(receives) == len(sends)


def test_further_servers_are_ranks_of_their_own(traced: pd.DataFrame) -> None:
    # A codec needs one set of servers, and theirs are not the ranks of those before.
    messages = traced[traced.group == "parameter server from rank 5"]
    assert set(messages["rank"]) == {0, 1, 2, 5}
    assert set(traced["rank"]) == {0, 1, 2, 3, 4, 5}
    sends = messages[messages.op == "send"]
    kept = sum(max(1, round(0.5 * elements)) for elements in (231, 33, 33, 1, 5, 5))
    assert sends[sends["rank"] < 5].bytes.sum() == STEPS * 3 * kept * 4
