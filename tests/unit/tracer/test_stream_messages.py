"""Messages in streams of the communication library, on a device whose true times are known.

The handles are played: those of NCCL need a GPU, and the tests in tests/gpu hold their times
against those of the profiler.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass

import pytest

from ddltrace.tracer.record.recorder import Message
from ddltrace.tracer.timing import stream_messages
from ddltrace.tracer.timing.device_use import DeviceUse
from ddltrace.tracer.timing.stream_messages import StreamMessages

PERIOD_NS = 5_000_000


@dataclass(eq=False)
class Work:
    """A handle of something that the device executes in an interval.

    Attributes:
        start_ns: When it begins.
        end_ns: When it ends.
        keeps_duration: Whether the library keeps how long it took.
        fails: Whether asking for its end fails.
    """

    start_ns: int
    end_ns: int
    keeps_duration: bool = True
    fails: bool = False


class Device:
    """Streams that are followed, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.ended: dict[int, tuple[int, int, str, bool]] = {}
        self.reached: dict[int, int] = {}
        self.streams = StreamMessages(
            self._is_completed, self._duration_ms, self.reached.get, self._completed, self._now
        )

    def _now(self) -> int:
        return self.now_ns

    def _is_completed(self, work: Work) -> bool:
        if work.fails:
            raise RuntimeError("NCCL communicator was aborted")
        return work.end_ns <= self.now_ns

    def _duration_ms(self, work: Work) -> float:
        if not work.keeps_duration:
            raise RuntimeError("getDuration only works if timing was enabled")
        return (work.end_ns - work.start_ns) / 1e6

    def _completed(self, message: Message, start: int, end: int, clock: str, failed: bool) -> None:
        self.ended[message.id] = (start, end, clock, failed)

    def mark(self, reached_ns: int) -> int:
        mark = len(self.reached)
        self.reached[mark] = reached_ns
        return mark

    def poll_until(self, end_ns: int) -> None:
        while self.now_ns < end_ns:
            self.now_ns += PERIOD_NS
            self.streams.poll()


def message(number: int, enqueue_ns: int, num_bytes: int = 8) -> Message:
    made = Message(number, "all_gather", "0", enqueue_ns, "dispatcher")
    made.out_bytes = num_bytes
    return made


@pytest.mark.parametrize("seed", range(20))
def test_intervals_follow_from_durations_and_the_order_of_the_stream(seed: int) -> None:
    draw = random.Random(seed)
    device = Device()
    busy = dict.fromkeys("abc", 0)
    true: dict[int, tuple[int, int]] = {}
    enqueue = device.now_ns
    for number in range(60):
        stream = draw.choice("abc")
        enqueue += draw.randrange(4_000_000)
        reached = enqueue + draw.randrange(20_000_000)  # the device lags behind the host
        start = max(reached, busy[stream])
        end = busy[stream] = start + draw.randrange(1, 9_000_000)
        true[number] = (start, end)
        mark, work = device.mark(reached), Work(start, end)
        device.streams.follow(stream, work, [message(number, enqueue)], mark)
    device.poll_until(max(busy.values()) + PERIOD_NS)
    assert {n: times[:2] for n, times in device.ended.items()} == true
    assert device.streams.num_followed == 0


def test_work_that_is_not_followed_shifts_an_interval_by_no_more_than_a_period() -> None:
    device = Device()
    begin = device.now_ns
    reached, start, end = begin + 1_000, begin + 50_000_000, begin + 61_000_000
    device.streams.follow("a", Work(start, end), [message(0, begin)], device.mark(reached))
    device.poll_until(end + PERIOD_NS)
    found_start, found_end, *_ = device.ended[0]
    assert found_end - found_start == end - start
    assert abs(found_end - end) <= PERIOD_NS


def test_without_a_duration_the_end_is_when_it_was_seen() -> None:
    device = Device()
    begin = device.now_ns
    work = Work(begin + 1_000, begin + 7_000_000, keeps_duration=False)
    device.streams.follow("a", work, [message(0, begin)], device.mark(begin + 1_000))
    device.poll_until(begin + 4 * PERIOD_NS)
    assert device.ended[0] == (begin + 1_000, begin + 2 * PERIOD_NS, "polling", False)


def test_coalesced_messages_have_one_interval_and_failures_are_noted() -> None:
    device = Device()
    begin = device.now_ns
    both = [message(0, begin), message(1, begin + 10)]
    device.streams.follow("a", Work(begin + 500, begin + 900), both, device.mark(begin + 500))
    device.streams.follow("a", Work(0, 0, fails=True), [message(2, begin + 20)], None)
    device.poll_until(begin + PERIOD_NS)
    assert device.ended[0] == device.ended[1] == (begin + 500, begin + 900, "device", False)
    assert device.ended[2][3]


def test_no_more_memory_of_the_job_is_held_than_some() -> None:
    device = Device()
    half = stream_messages.MAX_HELD_BYTES // 2
    messages = [message(number, device.now_ns, half) for number in range(6)]
    works = [Work(0, 1 << 62) for _ in messages]
    for work, each in zip(works, messages, strict=True):
        device.streams.follow("a", work, [each], None)
    lasting = message(6, device.now_ns, 8 * half)
    device.streams.follow("b", Work(0, 1 << 62), [lasting], None, memory_lasts=True)
    held = [weakref.ref(work) for work in works]
    del work, works  # the job drops them
    dropped = [device.streams.drop(each) is not None for each in (*messages, lasting)]
    assert dropped == [True] * 4 + [False] * 3
    assert [reference() is None for reference in held] == [True] * 4 + [False] * 2
    assert device.streams.num_followed == 3


def test_a_device_that_fails_leaves_no_message_open_and_keeps_nobody_waiting() -> None:
    device = Device()
    begin = device.now_ns
    for number in range(3):
        mark = device.mark(begin)
        device.streams.follow("a", Work(0, 1 << 62), [message(number, begin)], mark)
    device.now_ns += 7
    use = DeviceUse(lambda: None)
    use.when_failed.append(device.streams.lose)
    use.fail()
    assert device.ended == dict.fromkeys(range(3), (begin, begin + 7, "host", False))
    assert device.streams.num_followed == 0


def test_a_forked_child_follows_nothing() -> None:
    device = Device()
    device.streams.follow("a", Work(0, 1 << 62), [message(0, device.now_ns)], None)
    device.streams.abandon()
    assert device.streams.num_followed == 0
