"""Orders to switch recording: what each rank is asked for, and what is reported."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ddltrace.tracer.capture.job_order import Member, Order, carry_out
from ddltrace.tracer.capture.triggers import Triggers
from ddltrace.tracer.connections.requests import NAME, PREFIX, ask, remove_socket
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.trigger_expression import Trigger, parse_trigger


class Rank:
    """A rank that answers as it is told."""

    def __init__(
        self,
        rank: int,
        following: int,
        *,
        step_ns: int | None = 100_000_000,
        level: str | None = None,
        in_time: bool = True,
        marks: list[tuple[int, dict[str, int]]] | None = None,
        planned: int = -1,
    ) -> None:
        self.rank = rank
        self.in_time = in_time
        self.asked: list[dict[str, Any]] = []
        self.state = {
            "world_size": 3,
            "following": following,
            "planned": planned,
            "step_ns": step_ns,
            "level": level,
            "default_level": "layer",
            "marks": marks,
        }

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "state":
            return self.state
        self.asked.append(request)
        return {"in_time": self.in_time}


class Dead(Rank):
    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionRefusedError("nobody listens")


def members(*ranks: Rank) -> list[Member]:
    return [Member(rank.rank, rank.ask) for rank in ranks]


def test_all_ranks_change_with_a_step_that_none_has_begun() -> None:
    ranks = [Rank(0, 10), Rank(1, 12), Rank(2, 11, step_ns=None)]
    answer = carry_out(Order("on", steps=4, reason="why"), members(*ranks))
    assert answer == {"step": 15, "ranks": [0, 1, 2], "missing": [], "reasons": {}}
    for rank in ranks:
        assert rank.asked == [
            {
                "do": "plan",
                "changes": [[15, "layer"], [19, None]],
                "level_only": False,
                "reason": "why",
            }
        ]


def test_short_steps_get_more_of_them_as_a_lead() -> None:
    answer = carry_out(Order("off"), members(Rank(0, 5, step_ns=1_000_000)))
    assert answer["step"] == 305
    assert answer["missing"] == [1, 2]


def test_ranks_that_answer_late_get_a_longer_lead() -> None:
    class Late(Rank):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            time.sleep(0.2)
            return super().ask(request)

    answer = carry_out(Order("off"), members(Rank(0, 5), Late(1, 5), Rank(2, 5)))
    assert answer["step"] >= 5 + 10  # five times 0.2 s, at 0.1 s a step


def test_an_order_does_not_overtake_the_one_before() -> None:
    # Steps took 1 ms when the order before was given, so it begins late.
    ranks = [Rank(0, 5, planned=304), Rank(1, 5, planned=304), Rank(2, 5)]
    assert carry_out(Order("off"), members(*ranks))["step"] == 305
    attached = [
        Rank(0, 14, marks=marks(10, 55, 60), planned=40),
        Rank(1, 4, marks=marks(0, 55, 60), planned=30),
    ]
    assert carry_out(Order("level", level="comm"), members(*attached))["step"] == 41


def test_ranks_that_cannot_follow_are_named() -> None:
    ranks = [Rank(0, 3), Dead(1, 3), Rank(2, 3, in_time=False)]
    answer = carry_out(Order("off"), members(*ranks))
    assert (answer["ranks"], answer["missing"]) == ([0], [1, 2])
    assert "nobody listens" in answer["reasons"]["1"]
    assert "follows later" in answer["reasons"]["2"]


def test_an_order_for_some_ranks_leaves_the_others_alone() -> None:
    first, second = Rank(0, 3), Rank(1, 9)
    answer = carry_out(Order("on", ranks=(0, 7)), members(first, second))
    assert (answer["step"], answer["ranks"], answer["missing"]) == (12, [0], [7])
    assert second.asked == []


def marks(first: int, *numbers: int) -> list[tuple[int, dict[str, int]]]:
    """Of steps that ended when so many messages had been sent."""
    return [(first + place, {"0": number}) for place, number in enumerate(numbers)]


def test_ranks_that_were_attached_call_the_step_the_same() -> None:
    ranks = [
        Rank(0, 14, marks=marks(10, 55, 60, 65)),
        Rank(1, 4, marks=marks(0, 55, 60, 65)),
        Rank(2, 5, marks=marks(0, 50, 55, 60)),
    ]
    answer = carry_out(Order("on", steps=4, ranks=(0, 1)), members(*ranks))
    assert answer == {"step": 34, "ranks": [0, 1], "missing": [], "reasons": {}}
    # All of them: what is not recorded now may be later.
    assert [rank.asked[0]["called"] for rank in ranks] == [34, 34, 34]
    assert [rank.asked[0]["changes"] for rank in ranks] == [
        [[34, "layer"], [38, None]],
        [[24, "layer"], [28, None]],
        [[25, None]],
    ]


def test_a_level_gives_steps_no_other_number() -> None:
    ranks = [Rank(0, 14, marks=marks(10, 55, 60)), Rank(1, 4, marks=marks(0, 55, 60))]
    answer = carry_out(Order("level", level="comm"), members(*ranks))
    assert (answer["step"], answer["ranks"]) == (17, [0, 1])
    assert [rank.asked[0]["changes"] for rank in ranks] == [[[17, "comm"]], [[7, "comm"]]]
    assert "called" not in ranks[0].asked[0]


def test_nothing_changes_while_a_step_cannot_be_matched() -> None:
    ranks = [Rank(0, 14, marks=marks(10, 55, 60)), Rank(1, 4, marks=marks(0, 60, 65))]
    answer = carry_out(Order("on", ranks=(0, 1)), members(*ranks))
    assert (answer["step"], answer["missing"]) == (None, [0, 1])
    assert "rank 1 cannot be matched with those of rank 0" in answer["reasons"]["0"]
    assert [rank.asked for rank in ranks] == [[], []]


def test_a_rank_that_is_attached_after_the_numbering_cannot_follow() -> None:
    ranks = [Rank(0, 14), Rank(1, 4, marks=marks(0, 60, 65))]
    answer = carry_out(Order("on", ranks=(0, 1)), members(*ranks))
    assert (answer["ranks"], answer["missing"]) == ([0], [1])
    assert "after the job's steps had been numbered" in answer["reasons"]["1"]


def test_an_attached_rank_that_is_late_can_never_follow() -> None:
    ranks = [Rank(0, 4, marks=marks(0, 1, 2)), Rank(1, 4, marks=marks(0, 1, 2), in_time=False)]
    answer = carry_out(Order("on", ranks=(0, 1)), members(*ranks))
    assert (answer["ranks"], answer["missing"]) == ([0], [1])
    assert "cannot be matched any more" in answer["reasons"]["1"]


def test_a_job_of_one_rank_needs_no_match() -> None:
    rank = Rank(0, 3, marks=[])
    answer = carry_out(Order("on", ranks=(0,)), members(rank))
    assert (answer["ranks"], rank.asked[0]["called"]) == ([0], answer["step"])


def test_without_a_rank_nothing_changes() -> None:
    answer = carry_out(Order("on"), [])
    assert answer == {"step": None, "ranks": [], "missing": [], "reasons": {}}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"action": "start"},
        {"action": "on", "steps": 0},
        {"action": "on", "steps": True},
        {"action": "on", "level": "all"},
        {"action": "on", "ranks": ["x"]},
    ],
)
def test_what_is_no_order_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not an order|not a number|invalid literal"):
        Order.from_json(value)


def test_an_order_survives_its_json() -> None:
    order = Order("on", 3, "op", (0, 2), "slow")
    assert Order.from_json(order.to_json()) == order


@pytest.mark.parametrize(
    ("text", "trigger"),
    [
        ("step > 2x for 20 steps", Trigger(20, factor=2.0)),
        ("step>1.5x", Trigger(20, factor=1.5)),
        (" every 1h for 1 step ", Trigger(1, period_s=3600.0)),
        ("every 90 s for 5 steps", Trigger(5, period_s=90.0)),
        ("late>10ms for 5 steps", Trigger(5, late_ms=10.0, period_s=60.0)),
        ("late > 2.5 ms every 5m", Trigger(20, late_ms=2.5, period_s=300.0)),
    ],
)
def test_triggers_are_read(text: str, trigger: Trigger) -> None:
    assert parse_trigger(text) == trigger


@pytest.mark.parametrize(
    "text",
    [
        *("", "step", "step > 1x", "step > 2", "every 0s", "every 1d", "step > 2x for 0 steps"),
        *("late", "late>10s", "late>1ms every 0s", "late>1ms and more", "late>1ms for 0 steps"),
    ],
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a trigger"):
        parse_trigger(text)


def test_a_slow_step_gives_one_order() -> None:
    orders: list[Order] = []
    faults: list[object] = []

    def order(given: Order) -> dict[str, Any]:
        orders.append(given)
        return {}

    triggers = Triggers([Trigger(7, factor=2.0)], order, dict, lambda *fault: faults.append(fault))
    for number in range(40):
        triggers.after_step(number, 10_000_000)
    assert triggers._slow_step is None
    triggers.after_step(40, 35_000_000)
    first, second = triggers._slow_order(), triggers._slow_order()
    assert first == Order("on", 7, reason="step 40 took 3.5 times the median")
    assert second is None
    triggers.after_step(41, 35_000_000)
    assert triggers._slow_order() is None  # it rests


def test_only_the_socket_of_a_process_of_ours_is_asked_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}77-x"
    folder.mkdir(mode=0o700)
    path = folder / NAME
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        remove_socket(str(path), 78)
        assert path.exists()
        folder.chmod(0o777)  # others could put a socket of theirs there
        remove_socket(str(path), 77)
        assert path.exists()
        with pytest.raises(PermissionError, match="not a socket of this user"):
            ask(str(path), {}, 1)
        folder.chmod(0o700)
        remove_socket(str(path), 77)
    assert not folder.exists()
    with pytest.raises(PermissionError):
        ask(str(tmp_path / "other" / NAME), {}, 1)
