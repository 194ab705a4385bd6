"""A process group whose messages take the times of a protocol's profile.

Messages travel over another group, each behind its planned times. The receiver keeps a message
until it is due. Sender and receiver read the same clock, so all ranks have to run on one machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends.mailbox import Future, as_bytes, copy_into, fail
from ddltrace.experiments.transports.backends.messaging import MessagingGroup
from ddltrace.experiments.transports.paced_link import PacedLink
from ddltrace.experiments.transports.protocols import Protocol
from ddltrace.tracer.errors import MissingCapabilityError

_STAMP: Final = struct.Struct("<qq")
"""When a message was started, and when its first byte arrives (ns, `time.monotonic_ns`)."""
_PROBE_CHANNEL: Final = 2
_PROBE_BYTES: Final = (8, 1 << 20)
_PROBES: Final = 5
_PROBE_KEY: Final = "protocol"
_SPARE: Final = 2.0
"""How many times as slow as necessary the suggested slowdown is: a busy job has slower messages."""
_SHORTEST_SLEEP_NS: Final = 100_000
_LATE: Final = 1.05


class PacedMessages:
    """Counts the messages that this process has received, and their times.

    Attributes:
        messages: Number of messages.
        planned_us: Sum of their planned times (us).
        taken_us: Sum of their measured times (us).
        late: Messages that took over 5 % longer than planned.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.planned_us = 0.0
        self.taken_us = 0.0
        self.late = 0
        self._lock = threading.Lock()

    def add(self, planned_ns: int, taken_ns: int) -> None:
        """Counts one message."""
        with self._lock:
            self.messages += 1
            self.planned_us += planned_ns / 1e3
            self.taken_us += taken_ns / 1e3
            self.late += taken_ns > planned_ns * _LATE

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return {
            "messages": self.messages,
            "planned_us": self.planned_us,
            "taken_us": self.taken_us,
            "late": self.late,
        }


received: Final = PacedMessages()


class PacedGroup(MessagingGroup):
    """Paces the messages of another group."""

    def __init__(
        self,
        inner: MessagingGroup,
        protocol: Protocol,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        """Checks that this machine can keep the profile. Collective.

        Args:
            inner: Carries the messages.
            protocol: A paced protocol.
            store: Where ranks find each other.
            rank: This rank within the group.
            size: Ranks in the group.
            timeout: Longest time to wait for one operation.

        Raises:
            MissingCapabilityError: The inner group's messages take longer than those of the
                profile.
        """
        super().__init__(inner.getBackendName(), rank, size, timeout)
        self._inner = inner
        self._protocol = protocol
        self._link = PacedLink(protocol)
        self._lock = threading.Lock()
        self._owed_ns = 0.0
        self._timer = _Timer()
        try:
            self._check(store)
        except BaseException:
            self.shutdown()
            raise

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Sends the tensor with its planned times; complete when its link would be free again."""
        payload = as_bytes(tensor)
        framed = torch.empty(_STAMP.size + payload.nbytes, dtype=torch.uint8)
        view = as_bytes(framed)
        view[_STAMP.size :] = payload
        done: Future = torch.futures.Future()
        with self._lock:
            sent = self._link.send(time.monotonic_ns(), payload.nbytes)
            _STAMP.pack_into(view, 0, sent.start_ns, sent.first_ns)
            moved = self._inner.send_bytes(framed, peer, channel, tag)

        def leave(moved: Future) -> None:
            if not _failed(moved, done):
                self._timer.call(sent.left_ns, lambda: done.set_result([tensor]))

        moved.add_done_callback(leave)
        self._hold_processor(payload.nbytes)
        return done

    def receive_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Receives into the tensor when the message is due."""
        size = tensor.numel() * tensor.element_size()
        framed = torch.empty(_STAMP.size + size, dtype=torch.uint8)
        done: Future = torch.futures.Future()

        def arrive(moved: Future) -> None:
            if _failed(moved, done):
                return
            start_ns, first_ns = _STAMP.unpack_from(as_bytes(framed))
            # The receiver's link is shared in the order in which first bytes arrive.
            self._timer.call(first_ns, lambda: take(start_ns, first_ns))

        def take(start_ns: int, first_ns: int) -> None:
            due_ns = self._link.receive(first_ns, size)
            self._timer.call(due_ns, lambda: complete(start_ns, due_ns))

        def complete(start_ns: int, due_ns: int) -> None:
            try:
                copy_into(tensor, as_bytes(framed)[_STAMP.size :])
            except Exception as error:  # noqa: BLE001 - raised where the job waits
                fail(done, error)
                return
            received.add(due_ns - start_ns, time.monotonic_ns() - start_ns)
            done.set_result([tensor])

        self._inner.receive_bytes(framed, peer, channel, tag).add_done_callback(arrive)
        return done

    def close(self) -> None:
        """Closes the inner group."""
        self._inner.shutdown()
        self._timer.close()

    def _hold_processor(self, size: int) -> None:
        """Holds the sending thread for the processor time of the protocol.

        The message is under way at that time: the published latency contains this time already.
        """
        self._owed_ns += self._protocol.processor_ns(size)
        if self._owed_ns >= _SHORTEST_SLEEP_NS:
            begin = time.monotonic_ns()
            time.sleep(self._owed_ns / 1e9)
            self._owed_ns -= time.monotonic_ns() - begin

    def _check(self, store: Store) -> None:
        """Compares the inner group's messages between ranks 0 and 1 with the profile."""
        if self._ranks == 1:
            return
        if self._me <= 1:
            needed = max(self._probe(size) for size in _PROBE_BYTES)
            if self._me == 0:
                store.set(_PROBE_KEY, repr(needed))
        needed = float(store.get(_PROBE_KEY))
        if needed > 1:
            slowdown = math.ceil(needed * _SPARE * self._protocol.slowdown)
            raise MissingCapabilityError(
                f"the profile {self._protocol.spec} cannot be kept: the messages of "
                f"{self._name} take {needed:.3g} times as long here; use --protocol "
                f"{self._protocol.name}:slowdown={slowdown}"
            )

    def _probe(self, size: int) -> float:
        """The shortest one-way time of the inner group's messages over that of the profile."""
        message = torch.zeros(size, dtype=torch.uint8)
        peer, times = 1 - self._me, []
        for _ in range(_PROBES):
            begin = time.monotonic_ns()
            steps: list[Callable[..., Future]] = [
                self._inner.send_bytes,
                self._inner.receive_bytes,
            ]
            for step in steps if self._me == 0 else reversed(steps):
                step(message, peer, _PROBE_CHANNEL, 0).wait()
            times.append((time.monotonic_ns() - begin) / 2)
        return min(times) / self._protocol.planned_ns(size)


class _Timer:
    """Calls functions at given times, in their order, on a thread of its own."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ddltrace-pace", daemon=True)
        self._thread.start()

    def call(self, at_ns: int, function: Callable[[], None]) -> None:
        """Calls a function, which must not raise, at a time of `time.monotonic_ns`."""
        with self._changed:
            heapq.heappush(self._calls, (at_ns, next(self._numbers), function))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread when all functions have been called."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    if self._closed:
                        return
                    self._changed.wait()
                wait_ns = self._calls[0][0] - time.monotonic_ns()
                if wait_ns > 0:
                    self._changed.wait(wait_ns / 1e9)
                    continue
                _, _, function = heapq.heappop(self._calls)
            function()


def _failed(moved: Future, done: Future) -> bool:
    """Passes an error on."""
    try:
        moved.value()
    except Exception as error:  # noqa: BLE001 - raised where the job waits
        fail(done, error)
        return True
    return False
