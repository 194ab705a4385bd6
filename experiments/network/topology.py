"""The description of an emulated cluster: hosts, racks, rates, delay and a slow host. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.formatting.quantities import parse_bandwidth, parse_time
from ddltrace.tracer.errors import UsageError

MAX_HOSTS: Final = 64


def parse_loss(text: str) -> float:
    """Reads a share of lost packets such as ``0.1%``.

    Returns:
        The share in percent.

    Raises:
        UsageError: It is not a share below 100 %.
    """
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100 or not text.strip().endswith("%"):
        raise UsageError(f"--loss {text!r:.40} is not a share: write for example 0.1%")
    return percent


@dataclass(frozen=True)
class SlowHost:
    """A host whose link is slower than the others'.

    Attributes:
        host: Its number, from 0.
        factor: Its link's rate is divided by this.
        at_seconds: Start of the reduction, in seconds after the start of the job.
    """

    host: int
    factor: float
    at_seconds: float = 0.0

    @staticmethod
    def parse(text: str) -> SlowHost:
        """Reads ``host=2,factor=4`` or ``host=2,factor=4,at=10``.

        Raises:
            UsageError: The text has another form.
        """
        pairs = [part.partition("=") for part in text.split(",")]
        values = {key.strip(): value for key, _, value in pairs}
        try:
            slow = SlowHost(
                int(values.pop("host")),
                float(values.pop("factor")),
                float(values.pop("at", "0").removesuffix("s")),
            )
        except (KeyError, ValueError):
            slow = None
        if slow is None or values or not 1 <= slow.factor < 1e6 or not 0 <= slow.at_seconds < 1e9:
            raise UsageError(
                f"--slow-host {text!r:.60} cannot be read: write for example host=2,factor=4 or "
                "host=2,factor=4,at=10 (seconds after the start), with a factor of at least 1"
            )
        return slow


@dataclass(frozen=True)
class Topology:
    """A cluster of hosts, perhaps in racks.

    Attributes:
        hosts: Number of hosts.
        bits_per_second: Rate of each host's link, in each direction.
        hosts_per_rack: Neighbours that share a switch; None for one switch.
        bits_between: Rate of each rack's link to the core, in each direction; by default as much
            as the rack's hosts can send together.
        slow_host: A host with a slower link.
        delay_seconds: One-way delay between two hosts.
        loss_percent: Share of packets that each host loses when it sends.
        ranks_per_host: Ranks that run on each host.
    """

    hosts: int
    bits_per_second: int
    hosts_per_rack: int | None = None
    bits_between: int | None = None
    slow_host: SlowHost | None = None
    delay_seconds: float = 0.0
    loss_percent: float = 0.0
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if not 2 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"--hosts must be 2 to {MAX_HOSTS}, not {self.hosts}")
        if self.hosts_per_rack is not None and not 1 <= self.hosts_per_rack < self.hosts:
            raise UsageError(
                f"--hosts-per-rack must be 1 to {self.hosts - 1} with {self.hosts} hosts"
            )
        if self.bits_between is not None and self.hosts_per_rack is None:
            raise UsageError("--bandwidth-between needs --hosts-per-rack")
        if self.slow_host is not None and not 0 <= self.slow_host.host < self.hosts:
            raise UsageError(f"--slow-host: the hosts have the numbers 0 to {self.hosts - 1}")
        if not 1 <= self.ranks_per_host <= MAX_HOSTS:
            raise UsageError(f"--ranks-per-host must be 1 to {MAX_HOSTS}")

    @property
    def racks(self) -> list[list[int]]:
        """The hosts of each rack."""
        size = self.hosts_per_rack or self.hosts
        return [
            list(range(first, min(first + size, self.hosts)))
            for first in range(0, self.hosts, size)
        ]

    def rate_of(self, host: int, *, slowed: bool) -> int:
        """Rate of a host's link in bits per second.

        Args:
            host: Its number.
            slowed: Whether the slow host is slow already.
        """
        slow = self.slow_host
        if slowed and slow is not None and slow.host == host:
            return max(1, int(self.bits_per_second / slow.factor))
        return self.bits_per_second

    def rate_of_rack(self, rack: int) -> int:
        """Rate of a rack's link to the core in bits per second."""
        return self.bits_between or len(self.racks[rack]) * self.bits_per_second


def topology(
    *,
    hosts: int,
    bandwidth: str,
    hosts_per_rack: int | None = None,
    bandwidth_between: str | None = None,
    slow_host: str | None = None,
    delay: str | None = None,
    loss: str | None = None,
    ranks_per_host: int | None = None,
) -> Topology:
    """The topology described by the options of a command.

    Args:
        hosts: ``--hosts``; the other arguments have the names of their options as well.
        bandwidth: Rate of each host's link.
        hosts_per_rack: Hosts that share a switch.
        bandwidth_between: Rate of each rack's link.
        slow_host: See `SlowHost.parse`.
        delay: One-way delay.
        loss: Share of lost packets.
        ranks_per_host: Ranks on each host.

    Raises:
        UsageError: A value cannot be read, or is out of range.
    """
    return Topology(
        hosts=hosts,
        bits_per_second=parse_bandwidth(bandwidth),
        hosts_per_rack=hosts_per_rack,
        bits_between=None if bandwidth_between is None else parse_bandwidth(bandwidth_between),
        slow_host=None if slow_host is None else SlowHost.parse(slow_host),
        delay_seconds=0.0 if delay is None else parse_time(delay, "--delay"),
        loss_percent=0.0 if loss is None else parse_loss(loss),
        ranks_per_host=1 if ranks_per_host is None else ranks_per_host,
    )
