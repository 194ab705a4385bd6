"""The engine on two real ranks over Gloo: same numbers as DDP, agreed order, no deadlock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs import on_ranks, run

JOB = Path(__file__).parent / "jobs" / "exchange_job.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("exchange") / "report.json"
    done = run(on_ranks(JOB, str(output), ranks=2), cwd=output.parent, timeout=280)
    assert done.status == 0, done.stderr[-4000:]
    value: dict[str, Any] = json.loads(output.read_text())
    return value


def test_gradients_and_parameters_equal_ddps_to_the_last_bit(report: dict[str, Any]) -> None:
    assert len(report["equal_to_ddp"]) == 14
    assert all(report["equal_to_ddp"].values()), report["equal_to_ddp"]


@pytest.mark.parametrize("spec", ["wfbp", "fusion:cycle_ms=1", "p3:slice=4", "tictac"])
def test_ranks_agree_on_the_order_though_their_gradients_come_in_another(
    report: dict[str, Any], spec: str
) -> None:
    first, second = report["order"][spec]
    assert first["arrivals"] != second["arrivals"]
    assert sorted(first["arrivals"]) == sorted(second["arrivals"])
    assert first["messages"] == second["messages"]
    assert first["final"] == second["final"]
    assert sum(first["messages"]) == (5 + 30 + 3 + 18) * 4


def test_mgwfbp_merges_when_it_has_measured(report: dict[str, Any]) -> None:
    first, second = report["order"]["mgwfbp:steps=1,alpha_us=1e9"]
    assert first["arrivals"] != second["arrivals"]
    assert first["messages"] == second["messages"]
    assert first["final"] == second["final"]
    # Two steps of one message a tensor; then the network is measured, and all is one message.
    assert first["messages"][:8] == [5, 30, 3, 18] * 2
    assert first["messages"][-2:] == [56, 56]
    assert first["messages"].count(56) == 2


def test_a_plan_follows_the_order_of_rank_0(report: dict[str, Any]) -> None:
    # Rank 0 called `left` first, so the gradients of `right` (5 and 30 elements) came first.
    assert report["order"]["wfbp"][1]["messages"] == [5, 30, 3, 18] * 4


def test_one_step_delay_follows_its_rule(report: dict[str, Any]) -> None:
    assert len(report["delay"]) == 13
    assert all(report["delay"].values()), report["delay"]


def test_a_job_can_go_back_to_a_checkpoint_while_updates_are_due(report: dict[str, Any]) -> None:
    assert report["reloaded_equal_to_ddp"] == {"wfbp:wait=layer": True, "p3:slice=7": True}


@pytest.mark.parametrize("spec", ["fifo", "wfbp", "wfbp:wait=layer"])
def test_unused_parameters_are_handled_as_ddp_does(report: dict[str, Any], spec: str) -> None:
    assert report["unused_equal_to_ddp"][spec]
    assert report["unused_stays_none"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("missing", "find_unused_parameters=True"),
        ("around", "outside the forward of its own layer"),
        ("adam", "use torch.optim.SGD"),
        ("scaler", "a GradScaler skips steps"),
    ],
)
def test_misuse_is_an_error_that_names_the_fix(
    report: dict[str, Any], case: str, says: str
) -> None:
    assert says in report[case]


@pytest.mark.parametrize("bucket_mb", ["None", "0.01", "0.5"])
def test_the_plan_of_ddps_buckets_is_what_the_reducer_sends(
    report: dict[str, Any], bucket_mb: str
) -> None:
    found = report["ddp_plan"][bucket_mb]
    assert found["planned"] == found["real"]
    assert len(found["real"]) > 1


def test_factors_give_the_gradients_of_ddp_to_rounding(report: dict[str, Any]) -> None:
    assert len(report["factors"]["distances"]) == 9
    assert max(report["factors"]["distances"]) < 1e-5
    assert report["factors"]["replicas_equal"]


def test_factors_travel_where_the_rule_chooses_them_and_only_there(report: dict[str, Any]) -> None:
    sent = report["factors"]["sent"]

    def factors(rows: int, outputs: int = 80, inputs: int = 80) -> int:
        return 1 + rows * (outputs + inputs)

    def of(rows: int) -> list[int]:
        return [factors(2 * rows), factors(rows, inputs=200)]

    # Rank 1 has 3 x 3 rows, to which rank 0 pads, and `twice` runs two times a step. The weight
    # of `mixed` is used outside its layer, too: after three steps its factors are no longer sent.
    mixed, accumulated = factors(9), factors(18)
    assert sent[:2] == [[mixed, *of(9)]] * 2
    assert sent[2] == [accumulated, *of(18)]
    assert sent[3] == []  # too many rows
    assert sent[4] == of(18)  # with the rows of a pass whose gradients were dropped
    assert sent[5] == of(3)  # no rows on rank 1
    assert sent[6:] == [of(9)] * 3
