"""Device times from events, on a fake device whose true times are known."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddltrace.tracer.interpose.cuda import MessageTimer
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.timing.device_clock import DeviceClock, DeviceTimer, stream_lane
from ddltrace.tracer.timing.device_use import DeviceUse, ResolverThread


class Machine:
    """A host clock, and a device that runs ahead of or behind it at its own rate."""

    def __init__(self, drift_ppm: float = 0.0) -> None:
        self.now_ns = 1_000_000_000_000
        self.rate = 1 + drift_ppm * 1e-6
        self.look_ns = 4_000  # what one look at an event costs the host

    def now(self) -> int:
        return self.now_ns

    def device_ms(self, host_ns: int) -> float:
        return (host_ns - 999_000_000_000) * self.rate / 1e6


@dataclass
class Event:
    """Passed at a host time set by the test; `None` is never."""

    machine: Machine
    passes_ns: int | None = None
    delay_ns: int = 0
    handle: int = 0

    def record(self, stream: object = None) -> None:
        self.passes_ns = self.machine.now_ns + self.delay_ns

    def query(self) -> bool:
        self.machine.now_ns += self.machine.look_ns
        return self.passes_ns is not None and self.passes_ns <= self.machine.now_ns

    def elapsed_time(self, end: Event) -> float:
        assert self.passes_ns is not None
        assert end.passes_ns is not None
        return self.machine.device_ms(end.passes_ns) - self.machine.device_ms(self.passes_ns)


def clock_of(machine: Machine, *, latency_ns: int = 6_000) -> DeviceClock:
    return DeviceClock(
        lambda: Event(machine),
        lambda event: setattr(event, "passes_ns", machine.now_ns + latency_ns),  # type: ignore[arg-type]
        machine.now,
    )


def test_a_time_on_the_device_is_found_within_the_stated_error() -> None:
    machine = Machine()
    clock = clock_of(machine)
    assert clock.renew()
    event = Event(machine, passes_ns=machine.now_ns + 1_234_567)
    assert abs(clock.host_ns(event) - event.passes_ns) <= clock.max_error_ns
    assert 0 < clock.max_error_ns <= machine.look_ns


def test_a_host_that_is_stopped_between_two_looks_does_not_make_the_error_smaller() -> None:
    machine = Machine()
    passes: list[int] = []

    class Stopped(Event):
        def query(self) -> bool:
            passed = super().query()
            if not passed and self is anchor_events[0]:
                passes.append(self.passes_ns or 0)
                machine.now_ns += 1_500_000  # the device passes it while the host is stopped
            return passed

    anchor_events: list[Event] = []

    def new_event() -> Event:
        anchor_events.append(Stopped(machine))
        return anchor_events[-1]

    def record_idle(event: Event) -> None:
        event.passes_ns = machine.now_ns + 5_000

    clock = DeviceClock(new_event, record_idle, machine.now)  # type: ignore[arg-type]
    anchor = clock._take()
    assert anchor is not None
    assert passes
    assert abs(anchor.host_ns - passes[0]) <= anchor.error_ns
    assert anchor.error_ns > 700_000


def test_anchors_follow_a_drifting_device() -> None:
    machine = Machine(drift_ppm=50)
    clock = clock_of(machine)
    for _ in range(50):
        machine.now_ns += 1_000_000_000
        assert clock.renew()
        event = Event(machine, passes_ns=machine.now_ns + 10_000_000)
        # 50 ppm over the 10 ms since the anchor
        assert abs(clock.host_ns(event) - event.passes_ns) <= machine.look_ns + 501
    # What the last anchor had drifted when it was replaced, a second later, is admitted.
    assert 50_000 <= clock.max_error_ns <= 60_000


def test_a_device_too_busy_to_answer_gives_no_anchor_and_no_times() -> None:
    machine = Machine()
    clock = clock_of(machine, latency_ns=10_000_000_000)
    assert not clock.renew()
    assert clock.anchor is None


def test_a_busy_device_is_asked_seldom_and_the_old_anchor_serves_meanwhile() -> None:
    machine, asked = Machine(), []

    def record_idle(event: Event) -> None:
        asked.append(machine.now_ns)
        busy = len(asked) > 5  # the first anchor takes five tries
        event.passes_ns = machine.now_ns + (10_000_000_000 if busy else 6_000)

    clock = DeviceClock(lambda: Event(machine), record_idle, machine.now)
    assert clock.renew()
    machine.now_ns += 1_000_000_000
    for _ in range(100):
        assert clock.renew()
        machine.now_ns += 5_000_000
    spent_asking = 6_000_000  # at most: one try in 100 ms, each given up after 2 ms
    assert len(asked) - 5 <= (500_000_000 + spent_asking) // 100_000_000 + 1


def timer_of(
    machine: Machine,
    events: list[Event],
    recorder: Recorder,
    streams: list[int] | None = None,
    captured: list[bool] | None = None,
) -> DeviceTimer:
    """Of `captured`, each mark takes whether its stream is captured; at its end, it is not."""

    def new_event() -> Event:
        events.append(Event(machine))
        return events[-1]

    def current_stream() -> tuple[object, int]:
        return None, streams.pop(0) if streams else 3

    def is_capturing() -> bool:
        return bool(captured and captured.pop(0))

    return DeviceTimer(
        recorder, clock_of(machine), new_event, current_stream, is_capturing=is_capturing
    )


def mark_of(timer: DeviceTimer) -> int:
    mark = timer.mark()
    assert mark is not None
    return mark


def test_intervals_are_resolved_when_the_device_has_passed_them() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    site = recorder.site("kernel", "conv1")
    start = timer.mark()
    launched = machine.now_ns
    machine.now_ns += 500_000
    timer.interval(site, start)
    events[1].passes_ns = machine.now_ns + 2_000_000  # the device is behind the host
    assert timer.resolve() == 0
    assert recorder.flat == []
    machine.now_ns += 3_000_000
    assert timer.resolve() == 1
    found_site, start_ns, end_ns, lane = recorder.flat
    assert (found_site, lane) == (site, stream_lane(3))
    assert abs(start_ns - launched) < 10_000
    assert end_ns - start_ns == pytest.approx(2_500_000, abs=10)
    assert timer.num_pending == 0


def test_events_are_used_again() -> None:
    machine, recorder = Machine(), Recorder(1000)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    for _ in range(50):
        timer.interval(recorder.site("kernel", "layer"), timer.mark())
        timer.resolve()
    assert len(events) == 2
    assert len(recorder.flat) == 50 * 4


def test_the_end_of_one_interval_is_the_start_of_the_next() -> None:
    machine, recorder = Machine(), Recorder(1000)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    site = recorder.site("kernel", "weight.grad")
    mark = mark_of(timer)
    for _ in range(20):
        machine.now_ns += 1_000_000
        end = mark_of(timer)
        timer.keep(end)
        assert timer.interval(site, mark, end)
        mark = end
        timer.resolve()
    timer.forget(mark)
    assert recorder.flat[5::4] == recorder.flat[2:-4:4]
    assert len(events) == 2


def test_what_never_passes_is_counted() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    timer.interval(recorder.site("kernel", "layer"), timer.mark())
    events[1].passes_ns = None
    assert timer.resolve() == 0
    timer.abandon()
    assert recorder.dropped == 1


def test_a_full_buffer_drops_and_counts() -> None:
    machine, recorder = Machine(), Recorder(1)
    timer = timer_of(machine, [], recorder)
    for _ in range(4):
        timer.interval(recorder.site("kernel", "layer"), timer.mark())
    assert timer.resolve() == 4
    assert len(recorder.flat) + 4 * recorder.dropped == 16
    assert recorder.dropped > 0


def test_what_begins_in_one_stream_and_ends_in_another_is_no_interval() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder, streams=[3, 4, 4, 4])
    site = recorder.site("kernel", "layer")
    timer.interval(site, timer.mark())
    assert timer.num_pending == 0
    timer.interval(site, timer.mark())
    assert timer.resolve() == 1
    assert recorder.flat[3] == stream_lane(4)
    assert len(events) == 2  # those of the first pair were used again
    assert recorder.dropped == 0


@pytest.mark.parametrize("captured", [[True], [False, True]], ids=["at once", "in between"])
def test_nothing_is_recorded_into_a_stream_that_is_captured(captured: list[bool]) -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder, captured=captured)
    site = recorder.site("kernel", "layer")
    assert not timer.interval(site, timer.mark())
    assert timer.num_pending == 0
    assert all(event.passes_ns is not None for event in events)
    assert timer.interval(site, timer.mark())
    assert timer.resolve() == 1
    assert len(events) == 2  # what was recorded before the capture is used again


def test_streams_have_lanes_of_their_own() -> None:
    machine, recorder = Machine(), Recorder(100)
    timer = timer_of(machine, [], recorder, streams=[0, 0, 7, 7])
    for _ in range(2):
        timer.interval(recorder.site("kernel", "layer"), timer.mark())
    assert timer.resolve() == 2
    assert recorder.flat[3::4] == [stream_lane(0), stream_lane(7)]


def test_a_mark_tells_when_the_device_passed_it() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    early = mark_of(timer)
    assert timer.passed_ns(early) is None  # no anchor yet
    timer.resolve()
    late = mark_of(timer)
    assert len(events) == 1  # given back, whatever came of it
    events[0].passes_ns = machine.now_ns + 700_000
    assert timer.passed_ns(late) is None
    again = mark_of(timer)
    events[0].passes_ns = machine.now_ns + 700_000
    truth = events[0].passes_ns
    machine.now_ns += 1_000_000
    found = timer.passed_ns(again)
    assert found is not None
    assert abs(found - truth) <= machine.look_ns


def test_anchors_are_kept_fresh_only_while_they_are_used() -> None:
    machine, recorder, anchors = Machine(), Recorder(100), []

    def record_idle(event: Event) -> None:
        anchors.append(event)
        event.passes_ns = machine.now_ns + 6_000

    clock = DeviceClock(lambda: Event(machine), record_idle, machine.now)
    timer = DeviceTimer(recorder, clock, lambda: Event(machine), lambda: (None, 0))
    timer.resolve()
    taken = len(anchors)
    assert taken > 0
    for _ in range(20):
        machine.now_ns += 1_000_000_000
        timer.resolve()
    assert len(anchors) == taken
    timer.forget(mark_of(timer))
    timer.resolve()
    assert len(anchors) == 2 * taken


def test_the_resolver_prepares_its_thread_and_reports_a_device_that_fails() -> None:
    machine, recorder = Machine(), Recorder(100)
    faults: list[tuple[str, Exception]] = []
    prepared: list[int] = []

    class Broken(DeviceTimer):
        def resolve(self) -> int:
            raise RuntimeError("an illegal memory access was encountered")

    timer = Broken(recorder, clock_of(machine), lambda: Event(machine), lambda: (None, 0))
    resolver = ResolverThread(
        timer,
        lambda where, error: faults.append((where, error)),
        lambda: prepared.append(threading.get_ident()),
    )
    resolver.start()
    resolver.join(30)
    assert prepared == [resolver.ident]
    assert [where for where, _ in faults] == ["device clock"]
    assert resolver.stop(1.0)


def test_a_message_that_is_no_longer_held_ends_where_its_stream_goes_on() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    messages = message_timer_of(timer, recorder)
    timer.resolve()
    message = recorder.new_message("all_gather", "0", machine.now_ns, "dispatcher")
    messages.start(message, messages.mark())
    began = machine.now_ns
    machine.now_ns += 100_000
    messages.end_here(message)
    events[-1].passes_ns = began + 3_000_000
    assert list(recorder.open.values()) == [message]
    machine.now_ns += 5_000_000
    timer.resolve()
    assert recorder.finished == [message]
    assert message.start_ns == pytest.approx(began, abs=2 * machine.look_ns)
    assert message.end_ns == pytest.approx(began + 3_000_000, abs=2 * machine.look_ns)


def test_a_device_that_fails_leaves_no_message_open() -> None:
    machine, recorder = Machine(), Recorder(100)
    timer = timer_of(machine, [], recorder)
    messages = message_timer_of(timer, recorder)
    message = recorder.new_message("all_reduce", "0", machine.now_ns, "dispatcher")
    messages.end([message], messages.mark())
    timer.interval(recorder.site("kernel", "layer"), timer.mark())
    machine.now_ns += 1_000_000
    timer.abandon(lost_at_ns=machine.now_ns)
    assert recorder.finished == [message]
    assert (message.start_ns, message.end_ns) == (message.enqueue_ns, machine.now_ns)
    assert recorder.dropped == 1


def message_timer_of(timer: DeviceTimer, recorder: Recorder) -> MessageTimer:
    faults: list[tuple[str, Exception]] = []
    device = DeviceUse(lambda: None)
    device.start(timer)
    context: Any = SimpleNamespace(
        device=device,
        recorder=recorder,
        fault=lambda *fault: faults.append(fault),
    )
    return MessageTimer(context)


def test_a_message_starts_when_the_device_comes_to_it_and_ends_when_told() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    timer.resolve()
    messages = message_timer_of(timer, recorder)
    enqueued = machine.now_ns
    mark = messages.mark()
    assert mark is not None
    message = recorder.new_message("all_reduce", "0", enqueued, "dispatcher")
    messages.start(message, mark)
    events[0].passes_ns = enqueued + 800_000  # the device was busy until then
    machine.now_ns += 2_000_000
    recorder.complete(message, machine.now_ns, "gloo")
    assert message.enqueue_ns == enqueued
    assert abs(message.start_ns - (enqueued + 800_000)) <= machine.look_ns
    assert message.end_ns == enqueued + 2_000_000


def test_a_message_that_the_device_has_not_been_seen_to_reach_starts_at_its_launch() -> None:
    machine, recorder = Machine(), Recorder(100)
    messages = message_timer_of(timer_of(machine, [], recorder), recorder)
    message = recorder.new_message("all_reduce", "0", machine.now_ns, "dispatcher")
    messages.start(message, messages.mark())
    recorder.complete(message, machine.now_ns + 1000, "gloo")
    assert message.start_ns == message.enqueue_ns


def test_a_message_without_a_handle_ends_when_the_device_has_passed_it() -> None:
    machine, recorder = Machine(), Recorder(100)
    events: list[Event] = []
    timer = timer_of(machine, events, recorder)
    messages = message_timer_of(timer, recorder)
    message = recorder.new_message("all_reduce", "0", machine.now_ns, "dispatcher")
    mark = messages.mark()
    messages.end([message], mark)
    launched = machine.now_ns
    events[1].passes_ns = launched + 3_000_000
    timer.resolve()
    assert list(recorder.open.values()) == [message]
    machine.now_ns += 5_000_000
    timer.resolve()
    assert recorder.finished == [message]
    assert message.end_ns == pytest.approx(launched + 3_000_000, abs=machine.look_ns)
    assert recorder.flat == []


def test_only_messages_of_the_timed_device_have_device_times() -> None:
    machine, recorder = Machine(), Recorder(100)
    messages = message_timer_of(timer_of(machine, [], recorder), recorder)
    for index, is_timed in ((0, True), (1, False)):
        tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        assert messages.times(tensor) is is_timed
    message = recorder.new_message("all_reduce", "0", machine.now_ns, "dispatcher")
    messages.end([message], None)
    assert recorder.finished == [message]  # not as if it hung
