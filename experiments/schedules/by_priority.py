"""Messages by urgency, with a limit on the bytes in flight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from ddltrace.experiments.messages.message_plan import Message, MessagePlan
from ddltrace.experiments.schedules.base import Untimed

MEBIBYTE: Final = 1 << 20


class ByPriority(Untimed):
    """Starts the most urgent ready message whenever the credit allows.

    A ready message overtakes waiting messages of lower priority, but not messages in flight.
    Bytes in flight never pass the larger of the credit and one message.
    """

    def __init__(self, plan: MessagePlan, credit_bytes: float) -> None:
        """Takes a plan whose messages are numbered by urgency, most urgent first.

        Args:
            credit_bytes: Bytes that may be in flight together; one message always may.
        """
        self._messages = plan.messages
        self._carriers = plan.carriers
        self._credit = credit_bytes
        self._missing = [len(message.gradients) for message in plan.messages]
        self._ready: list[int] = []
        self._queued = [False] * len(plan.messages)
        self._in_flight = 0

    def gradient_ready(self, index: int) -> Sequence[Message]:
        """Queues the messages that have become ready."""
        for number in self._carriers[index]:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._queue(number)
        return self._release()

    def backward_ended(self) -> Sequence[Message]:
        """Queues everything."""
        for number in range(len(self._messages)):
            self._queue(number)
        return self._release()

    def completed(self, message: Message) -> Sequence[Message]:
        """Returns the credit of a message."""
        self._in_flight -= message.bytes
        return self._release()

    def rest(self) -> Sequence[Message]:
        """Returns all messages that wait for credit, the highest priority first."""
        left = [self._messages[number] for number in sorted(self._ready)]
        self._ready.clear()
        self._in_flight += sum(message.bytes for message in left)
        return left

    def _queue(self, number: int) -> None:
        if not self._queued[number]:
            self._queued[number] = True
            heapq.heappush(self._ready, number)

    def _release(self) -> Sequence[Message]:
        started = []
        while self._ready:
            message = self._messages[self._ready[0]]
            if self._in_flight and self._in_flight + message.bytes > self._credit:
                break
            heapq.heappop(self._ready)
            self._in_flight += message.bytes
            started.append(message)
        return started
