"""Messages that C++ has recorded: what becomes of them, whenever the writer looks.

The memory that C++ shares is played here, to have every order of things;
`tests/integration/test_gloo_messages.py` has the real one.
"""

from __future__ import annotations

import random
import time
from array import array
from typing import Any

import pytest
import torch

from ddltrace.tracer.interpose.c10d import known_messages
from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
from ddltrace.tracer.native.layout import CONTROL, MESSAGE, SLOT
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Launched, Message, Recorder

SIZE = 8
OPEN, OK, FAILED, GONE = range(4)
LAUNCHING, UNDER_WAY, FIRST = 1, 3, 4
LAUNCHED, TAKEN = CONTROL["launched"], CONTROL["taken"]
LIKE = ("reduce", "fc.weight", torch.float16, (4,), None)


class PlayedLibrary:
    """What C++ would share, and what it would do."""

    def __init__(self) -> None:
        self.control = memoryview(array("q", [0] * len(CONTROL)))
        self.ring = memoryview(array("q", [0] * (SIZE * len(MESSAGE))))
        self.slots = memoryview(array("q", [0] * (2 * SIZE * len(SLOT))))
        self.collectives = memoryview(array("q", [0] * 4))
        self.known = 0

    def passing(self) -> int:
        return 0

    def make_known(self, _counter: int, _what: int) -> int:
        self.known += 1
        return self.known - 1

    def see_launches(self) -> int:
        return 1

    def activate(self, place: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def next_collective(self, counter: int) -> int:
        self.collectives[counter] += 1
        return self.collectives[counter] - 1

    def begin_launch(self, _slot: int, _waited_once: bool) -> int:
        return 1

    def end_launch(self) -> None:
        pass

    def at(self, slot: int, field: str) -> int:
        """Where a field of the ring is."""
        return slot * len(MESSAGE) + MESSAGE[field]

    def what(self, slot: int) -> int:
        """What is at a place of the ring."""
        return self.ring[self.at(slot, "what")]

    def place(self) -> int | None:
        """The place of the next message in the ring; None if there is none."""
        for position in range(self.control[LAUNCHED], self.control[TAKEN] + SIZE):
            what = self.what(position % SIZE)
            if what != UNDER_WAY:
                return position % SIZE if what == 0 else None
        return None

    def launch(self, pattern: int, now: int, number: int) -> int:
        """A known message is launched; returns its slot."""
        return self._put(now, number, FIRST + pattern, id=-1, root=0, out_bytes=400)

    def launch_for_python(self, now: int) -> int:
        """A message is launched of which Python is to say what it is; returns its slot."""
        # 77: what another has left there
        return self._put(now, 77, LAUNCHING, id=-2, root=77, out_bytes=200)

    def _put(self, now: int, number: int, what: int, **values: int) -> int:
        slot = self.place()
        assert slot is not None, "no room"
        while self.control[LAUNCHED] % SIZE != slot:
            passed = self.control[LAUNCHED]
            self.ring[self.at(passed % SIZE, "passed")] = passed + 1
            self.control[LAUNCHED] += 1
        self._write_slot(slot, owner=1, began_ns=0, ended_ns=0, state=OPEN)
        values |= {"enqueue_ns": now, "number": number, "bytes": 400, "what": what}
        for name, value in values.items():
            self.ring[self.at(slot, name)] = value
        self.control[LAUNCHED] += 1
        return slot

    def end(self, slot: int, began: int, ended: int, state: int) -> None:
        """Gloo's thread tells the end of a message."""
        self._write_slot(slot, began_ns=began, ended_ns=ended, state=state)

    def _write_slot(self, slot: int, **values: int) -> None:
        for name, value in values.items():
            self.slots[slot * len(SLOT) + SLOT[name]] = value


class Rank:
    """A rank with one known bucket and one known broadcast."""

    def __init__(self) -> None:
        self.library: Any = PlayedLibrary()
        self.recorder = Recorder(1000)
        times = GlooTimes(self.library, self.recorder)
        self.known = KnownMessages(self.library, times, self.recorder)
        self.known.see_launches()
        self.group = group = Group(name="0", ranks=(5, 6), own=0)
        for op in ("all_reduce", "broadcast"):
            like = Message(0, op, "0", 0)
            like.name, like.tensors, like.dtype = f"a {op}", [7, 8], "float32"
            assert self.known.add(like, group) is not None

    def rows(self) -> list[dict[str, Any]]:
        self.known.collect()
        recorder = self.recorder
        batch = BatchBuilder(recorder.sites, recorder.patterns).build(recorder.take())
        return [] if batch is None else batch.to_pylist()


def say(
    rank: Rank,
    slot: int,
    now: int,
    like: Any = LIKE,
    *,
    seq: int | None = 0,
    peer: int | None = None,
    waited_once: bool = False,
) -> Launched | None:
    """Python says what a message is that was launched for it."""
    group = rank.group
    return rank.known.launched(slot, now, like, group, seq=seq, peer=peer, waited_once=waited_once)


def times(row: dict[str, Any]) -> tuple[int, int, int | None, str]:
    return row["enqueue_ns"], row["start_ns"], row["end_ns"], row["status"]


def test_what_has_ended_is_a_row_of_all_that_is_known() -> None:
    rank = Rank()
    rank.recorder.set_step(3, 50)
    rank.library.end(rank.library.launch(0, 100, 9), 110, 150, OK)
    (row,) = rank.rows()
    assert times(row) == (100, 110, 150, "ok")
    assert (row["op"], row["name"], row["group"]) == ("all_reduce", "a all_reduce", "0")
    assert (row["seq"], row["bytes"], row["out_bytes"], row["peer"]) == (9, 400, 400, 5)
    assert (row["tensors"], row["dtype"], row["step"]) == ([7, 8], "float32", 3)
    assert rank.rows() == []


def test_what_has_no_room_is_counted() -> None:
    rank = Rank()
    rank.recorder.buffer_rows = 2
    for number in range(3):
        rank.library.end(rank.library.launch(0, 100 + number, number), 110, 120, OK)
    assert [row["seq"] for row in rank.rows()] == [0, 1]
    assert rank.recorder.dropped == 1


def test_one_that_is_under_way_is_shown_and_told_again_at_its_end() -> None:
    rank = Rank()
    slot = rank.library.launch(0, 100, 0)
    (shown,) = rank.rows()
    assert times(shown) == (100, 100, None, "open")
    rank.library.end(slot, 110, 150, FAILED)
    (told,) = rank.rows()
    assert times(told) == (100, 110, 150, "failed")
    assert (told["id"], told["tensors"]) == (shown["id"], [7, 8])


@pytest.mark.parametrize("looks_before", [False, True])
def test_what_the_job_has_waited_for_was_over(looks_before: bool) -> None:
    rank = Rank()
    rank.known.begin_backward()
    slots = [rank.library.launch(0, 100, 0), rank.library.launch(1, 101, 1)]
    if looks_before:
        rank.rows()
    rank.known.end_backward(140)
    after = rank.library.launch(0, 145, 2)  # of the next pass
    for slot in (*slots, after):
        rank.library.end(slot, 110, 150, OK)
    ends = {row["enqueue_ns"]: row["end_ns"] for row in rank.rows()}
    # A broadcast was not waited for by a backward pass.
    assert ends == {100: 140, 101: 150, 145: 150}


@pytest.mark.parametrize("looks_before", [False, True])
def test_a_bucket_that_a_hook_in_python_launches_is_over_when_its_pass_is(
    looks_before: bool,
) -> None:
    rank = Rank()
    rank.known.begin_backward()
    bucket, another = (rank.library.launch_for_python(now) for now in (100, 101))
    say(rank, bucket, 100, ("all_gather", "bucket 0", torch.float16, (4,), None))
    say(rank, another, 101)
    if looks_before:
        rank.rows()
    rank.known.end_backward(140)
    for slot in (bucket, another):
        rank.library.end(slot, 110, 150, OK)
    ends = {row["name"]: row["end_ns"] for row in rank.rows()}
    assert ends == {"bucket 0": 140, "fc.weight": 150}


def test_one_whose_end_nobody_told_is_over_when_it_is_looked_at() -> None:
    rank = Rank()
    rank.library.end(rank.library.launch(0, 100, 0), 0, 0, GONE)
    (row,) = rank.rows()
    assert times(row)[:2] == (100, 100)
    assert row["end_ns"] > 100
    assert row["status"] == "ok"


def test_python_says_the_rest_of_what_was_launched_for_it() -> None:
    rank = Rank()
    patterns = len(rank.recorder.patterns)
    ended, under_way = (rank.library.launch_for_python(now) for now in (100, 200))
    sent = [
        say(rank, slot, now, seq=seq, peer=root)
        for slot, now, seq, root in ((ended, 100, 0, 1), (under_way, 200, 1, None))
    ]
    assert len(rank.recorder.patterns) == patterns + 1
    assert [(one.name, one.like.op) for one in sent if one is not None] == [
        ("fc.weight", "reduce")
    ] * 2
    rank.known.begin_backward()
    rank.known.end_backward(105)  # which waits for none of them
    rank.library.end(ended, 110, 150, OK)
    row, shown = sorted(rank.rows(), key=lambda row: row["enqueue_ns"] or 0)
    assert [row["id"], shown["id"]] == [one.id for one in sent if one is not None]
    assert times(row) == (100, 110, 150, "ok")
    assert times(shown) == (200, 200, None, "open")
    assert (row["op"], row["name"], row["dtype"], row["tensors"]) == (*LIKE[:2], "float16", [4])
    assert (row["seq"], shown["seq"], row["peer"], shown["peer"]) == (0, 1, 6, None)
    assert [(r["bytes"], r["out_bytes"]) for r in (row, shown)] == [(400, 200)] * 2
    rank.library.end(under_way, 210, 250, FAILED)
    (told,) = rank.rows()
    assert (told["id"], *times(told)) == (shown["id"], 200, 210, 250, "failed")


def test_a_signal_handler_may_send_one_of_a_new_kind_while_another_is_added() -> None:
    rank = Rank()
    first, second = rank.library.launch_for_python(100), rank.library.launch_for_python(110)
    told: list[Launched | None] = []

    class Interrupted(list[Message]):
        def append(self, message: Message, /) -> None:
            if not told:
                told.append(None)
                told.append(say(rank, second, 110, ("gather", "of a handler", None, None, None)))
            super().append(message)

    rank.recorder.patterns = Interrupted(rank.recorder.patterns)
    assert say(rank, first, 100) is not None
    assert told == [None, None]  # the handler's is recorded without the ring
    rank.library.end(first, 120, 130, OK)
    (row,) = rank.rows()
    assert (row["op"], row["name"], times(row)) == (LIKE[0], LIKE[1], (100, 120, 130, "ok"))


def test_one_of_which_python_says_nothing_holds_nobody_up_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, now = Rank(), 10**15
    monkeypatch.setattr(known_messages.time, "monotonic_ns", lambda: now)
    silent = rank.library.launch_for_python(now)
    rank.library.end(silent, now + 1, now + 2, OK)
    rank.library.end(rank.library.launch(0, now + 3, 0), now + 4, now + 5, OK)
    assert rank.rows() == []  # Python may be about to say it
    now += 3 * 10**9
    (row,) = rank.rows()
    assert row["enqueue_ns"] == 10**15 + 3
    place = rank.library.place()
    assert say(rank, silent, 10**15) is None
    assert rank.library.place() == place


def test_one_whose_end_nobody_will_tell_is_not_left_to_the_ring() -> None:
    rank = Rank()
    slot = rank.library.launch_for_python(100)
    rank.library.end(slot, 0, 0, GONE)
    assert say(rank, slot, 100) is None
    assert rank.rows() == []
    assert rank.library.what(slot) == 0  # the place is free


def test_one_that_goes_on_and_on_is_passed_over() -> None:
    rank = Rank()
    rank.known.begin_backward()
    endless = rank.library.launch(0, 100, 0)
    rank.rows()
    rank.known.end_backward(105)
    rank.known.begin_backward()
    ends = {}

    def look() -> None:
        ends.update({row["enqueue_ns"]: row["end_ns"] for row in rank.rows()})

    for now in range(200, 200 + 30 * SIZE, 10):
        slot = rank.library.launch(0, now, now)
        assert slot != endless
        if now % 30 == 0:
            look()
        rank.library.end(slot, now + 1, now + 5, OK)
        if now % 70 == 0 or rank.library.place() is None:
            look()
    rank.known.end_backward(10**6)
    rank.library.end(endless, 110, 10**7, OK)
    look()
    expected = {now: now + 5 for now in range(200, 200 + 30 * SIZE, 10)}
    assert ends == {100: 105, **expected}
    assert not rank.known._over
    assert rank.library.what(endless) == 0


def test_one_that_is_passed_over_while_the_writer_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, rows, expected = Rank(), {}, {}
    now = 0

    def launch(*, ends: bool) -> int:
        nonlocal now
        now += 10
        slot: int = rank.library.launch(0, now, now)
        expected[now] = now + 5
        if ends:
            rank.library.end(slot, now + 1, now + 5, OK)
        return slot

    def look() -> None:
        rows.update({row["enqueue_ns"]: row["end_ns"] for row in rank.rows()})

    endless, next_to_it = launch(ends=False), launch(ends=False)
    look()
    for _ in range(SIZE - 2):
        launch(ends=True)
    look()
    collect = rank.known._times.collect

    def late() -> list[int]:
        monkeypatch.undo()
        launch(ends=True)  # passes both over
        rank.library.end(next_to_it, 21, 25, OK)
        return collect()

    monkeypatch.setattr(rank.known._times, "collect", late)
    look()
    while rank.library.place() is not None:  # a slow writer: a lap, as far as that goes
        launch(ends=True)
    look()
    rank.library.end(endless, 11, 15, OK)
    for _ in range(3 * SIZE):
        launch(ends=True)
        look()
    assert rows == expected


@pytest.mark.parametrize("seed", range(20))
def test_whenever_the_writer_looks_it_is_the_same(seed: int) -> None:
    rng, rank = random.Random(seed), Rank()
    rows: dict[int, dict[str, Any]] = {}
    under_way: list[tuple[int, int]] = []
    expected, now = {}, 0
    for number in range(200):
        now += 10
        rank.known.begin_backward()
        full = rank.library.place() is None
        if not full:
            under_way.append((rank.library.launch(0, now, number), now))
        rng.shuffle(under_way)
        waits = rng.random() < 0.3
        while under_way and (full or rng.random() < 0.6):
            slot, enqueued = under_way.pop()
            late = 1000 if waits and enqueued == now else 0
            rank.library.end(slot, now + 1, now + 5 + late, OK)
            expected[enqueued] = now + 9 if late else now + 5
        if waits and not any(enqueued == now for _, enqueued in under_way):
            rank.known.end_backward(now + 9)
        if full or rng.random() < 0.4:
            rows |= {row["id"]: row for row in rank.rows()}
    for slot, enqueued in under_way:
        rank.library.end(slot, now, now + 5, OK)
        expected[enqueued] = now + 5
    rows |= {row["id"]: row for row in rank.rows()}
    assert {row["enqueue_ns"]: row["end_ns"] for row in rows.values()} == expected
    assert rank.recorder.dropped == 0
    assert not rank.known._over


SEND, RECEIVE = (("send", "send", torch.float32, None, 5), ("recv", "recv", torch.float32, None, 5))


@pytest.mark.parametrize("looks_before", [False, True])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("gloo_tells", [False, True])
def test_one_that_is_over_when_it_was_waited_for(
    looks_before: bool, failed: bool, gloo_tells: bool
) -> None:
    rank = Rank()
    slots = [rank.library.launch_for_python(now) for now in (100, 200)]
    sent = [
        say(rank, slot, now, like, seq=seq, peer=1, waited_once=True)
        for slot, now, like, seq in zip(slots, (100, 200), (SEND, RECEIVE), (3, 4), strict=True)
    ]
    if looks_before:
        assert [row["status"] for row in rank.rows()] == ["open", "open"]
    for slot, one, now in zip(slots, sent, (100, 200), strict=True):
        assert one is not None
        if gloo_tells:  # a part of it has ended
            rank.library.end(slot, now + 10, now + 50, OPEN)
        rank.known.waited(one, now + 60, failed=failed)
        rank.known.waited(one, now + 70, failed=not failed)
    for row, now, sizes in zip(rank.rows(), (100, 200), ((400, None), (None, 200)), strict=True):
        start, end = (now + 10, now + 50) if gloo_tells else (now, now + 60)
        assert times(row) == (now, start, end, "failed" if failed else "ok")
        assert (row["bytes"], row["out_bytes"]) == sizes
        assert (row["peer"], row["tag"], row["seq"]) == (6, 5, 3 if now == 100 else 4)
    assert rank.rows() == []


@pytest.mark.parametrize("looks_before", [False, True])
def test_one_that_nobody_will_wait_for_stays_open_and_holds_no_place(looks_before: bool) -> None:
    rank = Rank()
    slot = rank.library.launch_for_python(100)
    one = say(rank, slot, 100, SEND, waited_once=True)
    assert one is not None
    shown = rank.rows() if looks_before else []
    rank.library.end(slot, 0, 0, GONE)
    (row,) = shown + rank.rows()
    assert times(row) == (100, 100, None, "open")
    assert rank.library.what(slot) == 0
    rank.known.waited(one, 160, failed=False)  # another may be there by now
    rank.known.stop(5.0)
    assert rank.rows() == []


def test_the_end_of_the_job_waits_for_none_that_only_a_wait_completes() -> None:
    rank = Rank()
    say(rank, rank.library.launch_for_python(100), 100, SEND, waited_once=True)
    start = time.monotonic()
    rank.known.stop(5.0)
    assert time.monotonic() - start < 4
    assert [row["status"] for row in rank.rows()] == ["open"]
