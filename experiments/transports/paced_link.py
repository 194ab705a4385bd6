"""When paced messages leave and arrive: the two directions of one rank's link. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.transports.protocols import Protocol


@dataclass(frozen=True)
class Sent:
    """Planned times of a message, in nanoseconds of the caller's clock.

    Attributes:
        start_ns: When the sender started it.
        left_ns: When the sender's link is free again.
        first_ns: When its first byte arrives.
        arrival_ns: When it has arrived, unless it has to share the receiver's link.
    """

    start_ns: int
    left_ns: int
    first_ns: int
    arrival_ns: int


class PacedLink:
    """One rank's link, which carries one message at a time in each direction.

    Not safe for several threads.
    """

    def __init__(self, protocol: Protocol) -> None:
        """Starts with a free link.

        Args:
            protocol: A paced protocol.
        """
        self._protocol = protocol
        self._sends_until = 0
        self._receives_until = 0

    def send(self, now_ns: int, size: int) -> Sent:
        """Plans a message that starts now.

        Args:
            now_ns: The time.
            size: Bytes of the message.
        """
        occupied = round(self._protocol.occupied_ns(size))
        latency = round(self._protocol.latency_ns)
        begins = max(now_ns, self._sends_until)
        self._sends_until = begins + occupied
        return Sent(now_ns, self._sends_until, begins + latency, self._sends_until + latency)

    def receive(self, first_ns: int, size: int) -> int:
        """Plans the arrival of a message; to be called in the order of `Sent.first_ns`.

        Args:
            first_ns: When its first byte arrives.
            size: Bytes of the message.

        Returns:
            When it has arrived, after the messages before it.
        """
        begins = max(first_ns, self._receives_until)
        self._receives_until = begins + round(self._protocol.occupied_ns(size))
        return self._receives_until
