"""Messages that the compiled library has recorded: how they end, whenever the writer looks.

The library and Gloo are the real ones; `support/real_messages.py` decides when a message ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.real_messages import FREE, Flight, Library, Rank
from support.sampling import choose_seed

from ddltrace.tracer.interpose.c10d import known_messages
from ddltrace.tracer.native import build
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.recorder import Launched, Message

LIKE = ("reduce", "fc.weight", torch.float32, (4,), None)
BUCKET = ("reduce", "bucket 0", torch.float32, (4,), None)
SEND, RECEIVE = (("send", "send", torch.float32, None, 5), ("recv", "recv", torch.float32, None, 5))


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    path = build.installed() or (build.build() if build.compiler() else None)
    if path is None:
        pytest.skip("no C++ compiler on this machine")
    library = Library(NativeLibrary(path))
    yield library
    library.close()


@pytest.fixture
def rank(library: Library) -> Rank:
    return Rank(library)


def times(row: dict[str, Any]) -> tuple[int, int | None, str]:
    return row["enqueue_ns"], row["end_ns"], row["status"]


def test_what_has_ended_is_a_row_of_all_that_is_known(rank: Rank) -> None:
    rank.recorder.set_step(3, 50)
    before = time.monotonic_ns()
    flight = rank.all_reduce()
    rank.known.begin_broadcasts()
    broadcast = rank.launch("broadcast")
    assert broadcast is not None
    for each in (flight, broadcast):
        each.end()
    row, other = rank.rows()
    assert before <= row["enqueue_ns"] <= row["start_ns"] < row["end_ns"] <= time.monotonic_ns()
    assert (row["op"], row["name"], row["group"]) == ("all_reduce", "a all_reduce", "0")
    assert (row["seq"], row["bytes"], row["out_bytes"], row["peer"]) == (0, 400, 400, None)
    assert (row["tensors"], row["dtype"], row["step"]) == ([7, 8], "float32", 3)
    assert (other["op"], other["seq"], other["peer"]) == ("broadcast", 1, 6)
    assert row["status"] == other["status"] == "ok"
    assert rank.rows() == []


def test_what_has_no_room_is_counted(rank: Rank) -> None:
    rank.recorder.buffer_rows = 2
    for _ in range(3):
        rank.all_reduce().end()
    assert [row["seq"] for row in rank.rows()] == [0, 1]
    assert rank.recorder.dropped == 1


def test_one_that_is_under_way_is_shown_and_told_again_at_its_end(rank: Rank) -> None:
    flight = rank.all_reduce()
    (shown,) = rank.rows()
    assert times(shown) == (flight.enqueue_ns, None, "open")
    rank.pairs[0].peer = None  # the peer is gone
    flight.until_ended()
    (reported,) = rank.rows()
    assert (reported["enqueue_ns"], reported["status"]) == (flight.enqueue_ns, "failed")
    assert reported["end_ns"] > flight.enqueue_ns
    assert (reported["id"], reported["tensors"]) == (shown["id"], [7, 8])


@pytest.mark.parametrize("looks_before", [False, True])
def test_what_the_job_has_waited_for_was_over(rank: Rank, looks_before: bool) -> None:
    first = rank.all_reduce()
    rank.known.begin_broadcasts()
    broadcast = rank.launch("broadcast")
    assert broadcast is not None
    if looks_before:
        rank.rows()
    now = time.monotonic_ns()
    rank.known.end_backward(now)
    after = rank.all_reduce()  # of the next pass
    for flight in (first, broadcast, after):
        flight.end()
    ends = {row["enqueue_ns"]: row["end_ns"] for row in rank.rows()}
    assert ends[first.enqueue_ns] == now
    # A broadcast was not waited for by a backward pass.
    assert ends[broadcast.enqueue_ns] > now
    assert ends[after.enqueue_ns] > now


@pytest.mark.parametrize("looks_before", [False, True])
def test_a_bucket_that_a_hook_in_python_launches_is_over_when_its_pass_is(
    rank: Rank, looks_before: bool
) -> None:
    rank.known.begin_backward()
    bucket, another = rank.reduce(), rank.reduce()
    rank.say(bucket, BUCKET)
    rank.say(another, LIKE)
    if looks_before:
        rank.rows()
    now = time.monotonic_ns()
    rank.known.end_backward(now)
    for flight in (bucket, another):
        flight.end()
    ends = {row["name"]: row["end_ns"] for row in rank.rows()}
    assert ends["bucket 0"] == now
    assert ends["fc.weight"] > now


def sent_and_dropped(rank: Rank) -> Flight:
    """A send whose handle is gone: its end will not be reported."""
    flight = rank.send()
    flight.work = None
    return flight


def test_one_whose_end_nobody_told_is_over_when_it_is_looked_at(rank: Rank) -> None:
    flight = rank.launch_for_python(
        lambda pair: pair.own.send([torch.ones(100)], 1, 9), lambda peer: None
    )
    assert rank.say(flight, LIKE) is not None
    flight.work = None
    (row,) = rank.rows()
    assert row["enqueue_ns"] == row["start_ns"] == flight.enqueue_ns
    assert row["end_ns"] > flight.enqueue_ns
    assert row["status"] == "ok"


def test_python_says_the_rest_of_what_was_launched_for_it(rank: Rank) -> None:
    patterns = len(rank.recorder.patterns)
    ended, under_way = rank.reduce(), rank.reduce()
    sent = [rank.say(ended, LIKE, seq=0, peer=1), rank.say(under_way, LIKE, seq=1)]
    assert len(rank.recorder.patterns) == patterns + 1
    assert [(one.name, one.like.op) for one in sent if one is not None] == [
        ("fc.weight", "reduce")
    ] * 2
    rank.known.begin_backward()
    waited = time.monotonic_ns()
    rank.known.end_backward(waited)  # which waits for none of them
    ended.end()
    row, shown = sorted(rank.rows(), key=lambda row: row["enqueue_ns"] or 0)
    assert [row["id"], shown["id"]] == [one.id for one in sent if one is not None]
    assert (row["enqueue_ns"], row["status"]) == (ended.enqueue_ns, "ok")
    assert row["end_ns"] > waited
    assert times(shown) == (under_way.enqueue_ns, None, "open")
    assert (row["op"], row["name"], row["dtype"], row["tensors"]) == (*LIKE[:2], "float32", [4])
    assert (row["seq"], shown["seq"], row["peer"], shown["peer"]) == (0, 1, 6, None)
    assert [(r["bytes"], r["out_bytes"]) for r in (row, shown)] == [(400, 400)] * 2
    under_way.end()
    (reported,) = rank.rows()
    assert (reported["id"], reported["enqueue_ns"]) == (shown["id"], under_way.enqueue_ns)
    assert reported["status"] == "ok"


def test_a_signal_handler_may_send_one_of_a_new_kind_while_another_is_added(rank: Rank) -> None:
    first, second = rank.reduce(), rank.reduce()
    reported: list[Launched | None] = []

    class Interrupted(list[Message]):
        def append(self, message: Message, /) -> None:
            if not reported:
                reported.append(None)
                reported.append(rank.say(second, ("gather", "of a handler", None, None, None)))
            super().append(message)

    rank.recorder.patterns = Interrupted(rank.recorder.patterns)
    assert rank.say(first, LIKE) is not None
    assert reported == [None, None]  # the handler's is recorded without the ring
    first.end()
    (row,) = rank.rows()
    assert (row["op"], row["name"], row["status"]) == (LIKE[0], LIKE[1], "ok")
    second.end()


def test_one_of_which_python_says_nothing_holds_nobody_up_for_long(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = rank.reduce()
    silent.end()
    flight = rank.all_reduce()
    flight.end()
    late_s, clock = 0.0, time.monotonic_ns
    monkeypatch.setattr(known_messages.time, "monotonic_ns", lambda: silent.enqueue_ns + 1)
    assert rank.rows() == []  # Python may be about to say it
    late_s = 60.0
    monkeypatch.setattr(known_messages.time, "monotonic_ns", lambda: clock() + int(late_s * 10**9))
    (row,) = rank.rows()
    assert row["enqueue_ns"] == flight.enqueue_ns
    launched = rank.library.launched
    assert rank.say(silent, LIKE) is None
    assert rank.library.launched == launched
    assert rank.library.what(silent.place) == FREE


def test_one_whose_end_nobody_will_tell_is_not_left_to_the_ring(rank: Rank) -> None:
    flight = sent_and_dropped(rank)
    assert rank.say(flight, SEND) is None
    assert rank.rows() == []
    assert rank.library.what(flight.place) == FREE


def test_one_that_goes_on_and_on_is_passed_over(library: Library) -> None:
    rank = Rank(library, 1, alone=True)
    endless = rank.all_reduce()
    rank.rows()
    now = time.monotonic_ns()
    rank.known.end_backward(now)
    rank.known.begin_backward()
    rows, launched = {}, []
    for number in range(library.size + 500):
        flight = rank.launch(group=1)
        if flight is None:  # the writer is late
            rows.update({row["enqueue_ns"]: row for row in rank.rows()})
            continue
        assert flight.place != endless.place
        if number % 300 == 0:
            rows.update({row["enqueue_ns"]: row for row in rank.rows()})
        flight.end()
        launched.append(flight.enqueue_ns)
    rank.known.end_backward(time.monotonic_ns())
    endless.end()
    rows.update({row["enqueue_ns"]: row for row in rank.rows()})
    assert rows.pop(endless.enqueue_ns)["end_ns"] == now
    assert sorted(rows) == launched
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert not rank.known._over
    assert library.what(endless.place) == FREE


def test_one_that_is_passed_over_while_the_writer_is_at_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(library, 2, alone=True)
    rows, launched = {}, []

    def launch(group: int = 2, *, ends: bool = True) -> Flight | None:
        flight = rank.launch(group=group)
        if flight is not None:
            launched.append(flight.enqueue_ns)
            if ends:
                flight.end()
        return flight

    def look() -> None:
        rows.update({row["enqueue_ns"]: row for row in rank.rows()})

    rank.known.begin_backward()
    endless, next_to_it = launch(0, ends=False), launch(1, ends=False)
    assert endless is not None
    assert next_to_it is not None
    look()
    for _ in range(library.size - 2):
        assert launch() is not None
    look()
    collect = rank.known._times.collect

    def late() -> list[int]:
        monkeypatch.undo()
        assert launch() is not None  # passes both over
        next_to_it.end()
        return collect()

    monkeypatch.setattr(rank.known._times, "collect", late)
    look()
    while launch() is not None:  # a slow writer: a lap, as far as that goes
        pass
    look()
    endless.end()
    for number in range(1000):
        assert launch() is not None
        if number % 500 == 0:
            look()
    look()
    assert sorted(rows) == sorted(launched)
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_whenever_the_writer_looks_it_is_the_same(library: Library) -> None:
    rng, rank = random.Random(choose_seed()), Rank(library, 4, alone=True)
    alone = 4
    rows: dict[int, dict[str, Any]] = {}
    under_way: dict[int, Flight] = {}
    launched, waited_for = [], {}
    for _ in range(library.size + 1000):
        rank.known.begin_backward()
        group = rng.randrange(4) if rng.random() < 0.2 else alone
        flight = None
        if group not in under_way:
            flight = rank.launch(group=group)
            if flight is None:  # the ring is full
                rows |= {row["id"]: row for row in rank.rows()}
            else:
                under_way[group] = flight
                launched.append(flight.enqueue_ns)
        if rng.random() < 0.3:
            now = time.monotonic_ns()
            rank.known.end_backward(now)
            if flight is not None and group != alone:
                waited_for[flight.enqueue_ns] = now
        for group in rng.sample(sorted(under_way), rng.randrange(len(under_way) + 1)):
            under_way.pop(group).end()
        if rng.random() < 0.002:
            rows |= {row["id"]: row for row in rank.rows()}
    for flight in under_way.values():
        flight.end()
    rows |= {row["id"]: row for row in rank.rows()}
    found = {row["enqueue_ns"]: row for row in rows.values()}
    assert sorted(found) == launched
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len(waited_for) > 10
    assert {enqueued: found[enqueued]["end_ns"] for enqueued in waited_for} == waited_for
    assert all(row["enqueue_ns"] <= row["start_ns"] <= row["end_ns"] for row in rows.values())
    assert rank.recorder.dropped == 0
    assert not rank.known._over


@pytest.mark.parametrize("looks_before", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_one_whose_end_only_python_tells_is_over_when_it_was_waited_for(
    rank: Rank, looks_before: bool, failed: bool
) -> None:
    flights = (rank.send(), rank.receive(tag=6))
    sent = [
        rank.say(flight, like, seq=seq, peer=1, waited_once=True)
        for flight, like, seq in zip(flights, (SEND, RECEIVE), (3, 4), strict=True)
    ]
    if looks_before:
        assert [row["status"] for row in rank.rows()] == ["open", "open"]
    ends = []
    for one in sent:
        assert one is not None
        ends.append(time.monotonic_ns())
        rank.known.waited(one, ends[-1], failed=failed)
        rank.known.waited(one, ends[-1] + 1, failed=not failed)
    rows = rank.rows()
    assert [times(row) for row in rows] == [
        (flight.enqueue_ns, end, "failed" if failed else "ok")
        for flight, end in zip(flights, ends, strict=True)
    ]
    assert [(row["bytes"], row["out_bytes"]) for row in rows] == [(400, None), (None, 400)]
    assert [(row["peer"], row["tag"], row["seq"]) for row in rows] == [(6, 5, 3), (6, 5, 4)]
    assert rank.rows() == []
    for flight in flights:  # Gloo may hang when a receive under way is deleted
        flight.complete()


@pytest.mark.parametrize("looks_before", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_one_whose_end_gloo_tells_in_the_wait(rank: Rank, looks_before: bool, failed: bool) -> None:
    flight = rank.receive()
    one = rank.say(flight, RECEIVE, seq=4, peer=1, waited_once=True)
    assert one is not None
    shown = rank.rows() if looks_before else []
    if failed:
        rank.pairs[0].peer = None
        with pytest.raises(RuntimeError):
            flight.work.wait()
    else:
        flight.complete()
    after = time.monotonic_ns()
    rank.known.waited(one, after, failed=failed)
    (row,) = rank.rows()
    assert (row["enqueue_ns"], row["status"]) == (flight.enqueue_ns, "failed" if failed else "ok")
    assert flight.enqueue_ns < row["end_ns"] < after
    assert [each["id"] for each in shown] == [row["id"]] * looks_before
    assert rank.rows() == []


@pytest.mark.parametrize("looks_before", [False, True])
def test_one_that_nobody_will_wait_for_stays_open_and_holds_no_place(
    rank: Rank, looks_before: bool
) -> None:
    flight = rank.send()
    one = rank.say(flight, SEND, waited_once=True)
    assert one is not None
    shown = rank.rows() if looks_before else []
    flight.work = None
    (row,) = shown + rank.rows()
    assert times(row) == (flight.enqueue_ns, None, "open")
    assert rank.library.what(flight.place) == FREE
    rank.known.waited(one, time.monotonic_ns(), failed=False)  # another may be there by now
    rank.known.stop(5.0)
    assert rank.rows() == []


def test_the_end_of_the_job_waits_for_none_that_only_a_wait_completes(rank: Rank) -> None:
    flight = rank.send()
    rank.say(flight, SEND, waited_once=True)
    start = time.monotonic()
    rank.known.stop(1000.0)
    assert time.monotonic() - start < 900
    assert [row["status"] for row in rank.rows()] == ["open"]
    flight.complete()
