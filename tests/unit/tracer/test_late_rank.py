"""A late rank is found by the times that the ranks spend in collectives."""

from __future__ import annotations

import threading
from typing import Any

from ddltrace.tracer.capture.job_order import Order
from ddltrace.tracer.capture.late_rank import (
    LOOK,
    STEPS,
    MessageTimes,
    Times,
    find_late_rank,
)
from ddltrace.tracer.capture.triggers import Triggers
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.trace.run_info import GroupInfo
from ddltrace.tracer.trigger_expression import Trigger

MS = 1_000_000
LOOKED_AT = range(11, 20)


def times(*of_ranks: float, group: str = "0 of 0", steps: range = LOOKED_AT) -> dict[int, Times]:
    """The same time in collectives in each step, in ms, by rank."""
    return {
        rank: {group: {str(step): int(ms * MS) for step in steps}}
        for rank, ms in enumerate(of_ranks)
    }


def test_the_rank_that_spends_least_time_in_collectives_is_late() -> None:
    assert find_late_rank(times(41, 44, 12, 40), 10 * MS) == (2, 29.0 * MS)
    assert find_late_rank(times(40, 12), 10 * MS) == (1, 28.0 * MS)
    assert find_late_rank(times(41, 44, 32, 40), 10 * MS) is None
    assert find_late_rank(times(12), 10 * MS) is None
    assert find_late_rank({}, 10 * MS) is None


def test_it_has_to_be_late_in_most_steps() -> None:
    found: dict[int, Any] = times(40, 12)
    found[1]["0 of 0"]["12"] = 40 * MS
    assert find_late_rank(found, 10 * MS) == (1, 28.0 * MS)
    found[1]["0 of 0"]["13"] = 80 * MS  # the other one is late
    assert find_late_rank(found, 10 * MS) is None
    assert find_late_rank(times(40, 12, steps=range(11, 15)), 10 * MS) is None


def test_groups_are_looked_at_for_themselves() -> None:
    # Ranks 0 and 1 are stages that communicate less than ranks 2 and 3.
    first, second = times(10, 11), times(99, 99, 60, 30, group="0 of 2")
    both = {rank: first[rank] for rank in (0, 1)} | {rank: second[rank] for rank in (2, 3)}
    assert find_late_rank(both, 20 * MS) == (3, 30.0 * MS)
    assert find_late_rank(both, 40 * MS) is None


def test_times_are_those_of_collectives_in_the_steps() -> None:
    recorder, kept = Recorder(100), MessageTimes()
    kept.follow(range(1, 3))
    builder = BatchBuilder(recorder.sites, recorder.patterns)

    def send(op: str, group: str, start: int, end: int | None) -> None:
        message = recorder.new_message(op, group, start, "method")
        if end is not None:
            recorder.complete(message, end, "gloo")

    def write() -> None:
        batch = builder.build(recorder.take())
        assert batch is not None
        kept.add(batch)

    for step in range(4):
        recorder.set_step(step, 1000 * step)
        at = 1000 * step
        send("all_reduce", "0", at + 100, at + 300)
        send("all_gather", "0", at + 200, at + 400)  # overlaps it
        send("broadcast", "1", at + 500, at + 510)
        send("all_reduce", "unknown", at + 500, at + 510)
        send("send", "0", at + 600, at + 700)
        send("all_reduce", "0", at + 800, None)
        recorder.record("layer", "x", at + 100, at + 900)
        write()
    groups = [GroupInfo("0", "", "gloo", (4, 5)), GroupInfo("1", "", "gloo", (0, 4))]
    expected = {"0 of 4": {"1": 300, "2": 300}, "1 of 0": {"1": 10, "2": 10}}
    assert kept.sums(groups) == expected
    kept.follow(range(7, 9))
    assert kept.sums(groups) == {}


class Job:
    """Rank 0 and the others, which are late as they are told."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.late = 1
        self.faults: list[object] = []
        self.looked = threading.Event()
        self.triggers = Triggers(
            [Trigger(7, late_ms=10.0, period_s=1e9)],
            self.order,
            self.answers,
            lambda *fault: self.faults.append(fault),
        )

    def order(self, order: Order) -> dict[str, Any]:
        self.orders.append(order)
        self.looked.set()
        return {"step": 10}

    def answers(self, request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        assert request == {"do": "times"}
        found = times(*(40 - 30 * (rank == self.late) for rank in range(3)))
        return {rank: {"times": of_rank} for rank, of_rank in found.items()}

    def look(self) -> Order | None:
        found: list[Order | None] = []
        self.triggers.after_step(9, MS)
        self.looked.clear()
        thread = threading.Thread(target=lambda: found.append(self.triggers._look(10.0, 7)))
        thread.start()
        assert self.looked.wait(10)
        while thread.is_alive():
            self.triggers.after_step(10 + STEPS, MS)
            thread.join(0.05)
        return found[0]


def test_a_rank_that_stays_late_is_recorded_once(monkeypatch: Any) -> None:
    monkeypatch.setattr("ddltrace.tracer.capture.triggers._SETTLE_S", 0.0)
    job = Job()
    assert job.triggers._look(10.0, 7) is None  # no step was unrecorded
    reason = "rank 1 was late by 30.0 ms in most of the steps 11 to 19"
    assert job.look() == Order("on", 7, reason=reason)
    assert job.look() is None
    job.late = -1
    assert job.look() is None
    job.late = 1
    assert job.look() is not None
    job.late = 2
    assert job.look() is not None
    assert set(job.orders) == {Order("on", STEPS, level="comm", reason=LOOK)}
    assert job.faults == []
