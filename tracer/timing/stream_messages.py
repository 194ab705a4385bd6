"""Times messages that a device executes in a stream of the communication library, as NCCL's.

The host launches such a message and goes on; `Work.wait` only lets another stream wait for it. The
library's stream cannot be reached from outside, so no event of ours can stand in it. But PyTorch
keeps an event before and behind each message (`ProcessGroup._enable_collectives_timing`) and tells
how long the device took between the two (`Work._get_duration`). The place of that interval follows
from the order of the streams: a message begins when the job's stream has reached its launch, and
when the message before it in the library's stream has ended. Our event for the former stands in the
job's stream right behind the launch: one in front of it would be passed while the host is still
launching. What is seen of its handle bounds the interval: it had not ended when it was last seen
running, and it had when it was first seen complete.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddltrace.tracer.record.recorder import Message

MAX_HELD_BYTES: Final = 1 << 26
"""Maximum memory of the job, bytes, whose lifetime the tracer may extend to follow messages."""


@dataclass(slots=True)
class Launch:
    """What was launched as one.

    Attributes:
        work: Its handle, which holds the memory that it writes to.
        messages: Its messages: several if they were coalesced.
        mark: Position in the job's stream right behind the launch; None if it is not known.
        held_bytes: Memory that only the handle keeps.
        running_ns: When it was last seen running.
    """

    work: Any
    messages: Sequence[Message]
    mark: int | None
    held_bytes: int
    running_ns: int


class _Stream:
    """What was launched into one stream, in order, and when the last of it ended."""

    __slots__ = ("end_ns", "launches")

    def __init__(self) -> None:
        self.launches: deque[Launch] = deque()
        self.end_ns = 0


class StreamMessages:
    """Follows messages in the streams of the communication library to their end.

    Args:
        is_completed: The original ``Work.is_completed``.
        duration_ms: The original ``Work._get_duration``.
        passed_ns: When the device passed a mark; None if that is not known. Consumes the mark.
        completed: Called with a message at its end: start, end, what they were read from (one of
            `CLOCKS`), and whether it failed.
        now: The host's clock.
    """

    def __init__(
        self,
        is_completed: Callable[[Any], bool],
        duration_ms: Callable[[Any], float],
        passed_ns: Callable[[int], int | None],
        completed: Callable[[Message, int, int, str, bool], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._is_completed = is_completed
        self._duration_ms = duration_ms
        self._passed_ns = passed_ns
        self._completed = completed
        self._now = now
        self._streams: dict[Hashable, _Stream] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_followed(self) -> int:
        """Number of launches that are not known to have ended."""
        return sum(len(stream.launches) for stream in list(self._streams.values()))

    def follow(
        self,
        stream: Hashable,
        work: Any,
        messages: Sequence[Message],
        mark: int | None,
        *,
        memory_lasts: bool = False,
    ) -> None:
        """Records the end of what was launched as one.

        Args:
            stream: Names the library's stream.
            work: Its handle.
            mark: Position in the job's stream right behind the launch.
            memory_lasts: Whether the job itself keeps the memory that it writes to.
        """
        held = 0 if memory_lasts else sum(m.out_bytes or m.bytes or 0 for m in messages)
        launch = Launch(work, messages, mark, held, messages[0].enqueue_ns)
        with self._lock:
            self._streams.setdefault(stream, _Stream()).launches.append(launch)
            self._held_bytes += held

    def poll(self) -> None:
        """Completes what the device has ended; called often, from one thread only."""
        for stream in list(self._streams.values()):
            while stream.launches and self._advance(stream):
                pass

    def drop(self, message: Message) -> Launch | None:
        """Drops a message that the job no longer holds, if the tracer holds too much memory.

        Args:
            message: A message whose end is recorded elsewhere.

        Returns:
            Its launch, whose end will not be recorded here; None if it was not dropped.
        """
        if self._held_bytes <= MAX_HELD_BYTES:
            return None
        with self._lock:
            for stream in self._streams.values():
                for launch in stream.launches:
                    if launch.messages == [message]:
                        stream.launches.remove(launch)
                        self._held_bytes -= launch.held_bytes
                        return launch
        return None

    def stop(self, timeout_s: float) -> None:
        """Waits until everything launched so far has ended, at most for the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.num_followed and time.monotonic() < deadline:
            time.sleep(0.001)

    def lose(self) -> None:
        """Ends everything that is followed now: the device's events fail, nobody will ask again."""
        now = self._now()
        for stream in list(self._streams.values()):
            while stream.launches:
                for message in stream.launches.popleft().messages:
                    self._completed(message, message.start_ns, now, "host", False)
        self._held_bytes = 0

    def abandon(self) -> None:
        """Releases all objects of the job, in a forked child."""
        self._streams.clear()

    def _advance(self, stream: _Stream) -> bool:
        """Completes the first launch of a stream; returns whether it has ended."""
        with self._lock:
            launch = stream.launches[0] if stream.launches else None
        if launch is None:
            return False
        asked = self._now()
        failed = False
        try:
            if not self._is_completed(launch.work):
                launch.running_ns = asked
                return False
        except Exception:  # noqa: BLE001 - the job sees the same error at its own wait
            failed = True
        start, end, clock = self._interval(stream, launch, self._now())
        stream.end_ns = end
        with self._lock:
            if not stream.launches or stream.launches[0] is not launch:
                return True  # dropped meanwhile
            stream.launches.popleft()
            self._held_bytes -= launch.held_bytes
        for message in launch.messages:
            self._completed(message, start, end, clock, failed)
        return True

    def _interval(self, stream: _Stream, launch: Launch, seen_ns: int) -> tuple[int, int, str]:
        """Start and end of a launch that has ended by `seen_ns`, and what they were read from."""
        enqueued = launch.messages[-1].enqueue_ns
        reached = None if launch.mark is None else self._passed_ns(launch.mark)
        start = max(enqueued, stream.end_ns, reached or 0)
        try:
            duration = round(self._duration_ms(launch.work) * 1e6)
        except Exception:  # noqa: BLE001 - not kept for this message
            return min(start, seen_ns), seen_ns, "polling"
        end = min(max(start + duration, launch.running_ns), seen_ns)
        return max(end - duration, enqueued), end, "device"
