"""Measures the links of an emulated network before a job runs on it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddltrace.experiments.network.emulated import EmulatedNetwork
from ddltrace.tracer.errors import DdltraceError

TOLERANCE: Final = 0.05
"""Tolerated relative deviation of links from their rates."""

_FLOW: Final = str(Path(__file__).with_name("flow.py"))
_SECONDS: Final = 0.8
_WARMUP: Final = 0.4
_TRIES: Final = 4
# A full Ethernet frame of 1514 bytes carries 1448 bytes of TCP with time stamps.
_FRAME_SHARE: Final = 1514 / 1448
# All links at once if this machine is fast enough for their sum.
_BITS_AT_ONCE: Final = 4e9
_MAX_FLOWS: Final = 8
_PINGS: Final = 20
# Tolerated time of a round trip through the bridges of a busy machine, without the delay.
_OWN_ROUND_TRIP_S: Final = 1e-3


class LinksOffError(DdltraceError):
    """The emulated network deviates from its description, so results would be wrong."""


@dataclass(frozen=True)
class MeasuredLink:
    """One link, or all of a rack's flows to another rack.

    Attributes:
        name: Name of the link.
        bits_per_second: Measured rate, including headers.
        expected: Expected rate.
    """

    name: str
    bits_per_second: float
    expected: float

    @property
    def is_off(self) -> bool:
        """Whether it differs by more than the tolerance."""
        return abs(self.bits_per_second / self.expected - 1) > TOLERANCE

    def __str__(self) -> str:
        measured, expected = self.bits_per_second / 1e6, self.expected / 1e6
        return f"{self.name} {measured:.4g} of {expected:.4g} Mbit/s"


@dataclass(frozen=True)
class _Flows:
    """Connections that are measured at the same time, and the sum of their rates."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    expected: float


def check_links(network: EmulatedNetwork) -> list[MeasuredLink]:
    """Measures every host's link and every rack's, without delay and loss.

    Args:
        network: An existing network without other traffic.

    Returns:
        The links.

    Raises:
        LinksOffError: A link deviates by more than `TOLERANCE` in each measurement.
    """
    links = [link for batch in _batches(_host_flows(network)) for link in _measured(network, batch)]
    links += [link for flows in _rack_flows(network) for link in _measured(network, [flows])]
    off = [str(link) for link in links if link.is_off]
    if off:
        raise LinksOffError(
            f"the emulated network is off by more than {TOLERANCE:.0%}: {'; '.join(off)}; this "
            "machine may be too busy or too slow for it: end other programs, or lower --bandwidth"
        )
    return links


def check_round_trip(network: EmulatedNetwork) -> float:
    """Measures the shortest round trip between the first and the last host.

    Returns:
        Seconds.

    Raises:
        LinksOffError: It differs from twice the topology's delay.
    """
    with contextlib.ExitStack() as stack:
        last = len(network.hosts) - 1
        server = stack.enter_context(_process(network, last, "reply", network.addresses[last]))
        arguments = ("ping", network.addresses[last], _line(server), str(_PINGS))
        measured = float(_line(stack.enter_context(_process(network, 0, *arguments))))
    expected = 2 * network.topology.delay_seconds
    if not expected * (1 - TOLERANCE) <= measured <= expected * (1 + TOLERANCE) + _OWN_ROUND_TRIP_S:
        raise LinksOffError(
            f"the emulated network is off: a round trip takes {measured * 1e3:.3g} ms, not "
            f"{expected * 1e3:.3g} ms; this machine may be too busy: end other programs"
        )
    return measured


def _host_flows(network: EmulatedNetwork) -> list[_Flows]:
    """Each host sends to its neighbour in the rack, so each sends once and receives once."""
    flows = []
    topology = network.topology
    slowed = topology.slow_host is not None and topology.slow_host.at_seconds == 0
    for rack, hosts in enumerate(topology.racks):
        for place, host in enumerate(hosts):
            limits = [topology.rate_of(host, slowed=slowed)]
            if len(hosts) > 1:
                peer = hosts[(place + 1) % len(hosts)]
            else:
                other = (rack + 1) % len(topology.racks)
                peer = topology.racks[other][0]
                limits += [topology.rate_of_rack(rack), topology.rate_of_rack(other)]
            limits.append(topology.rate_of(peer, slowed=slowed))
            flows.append(_Flows(f"host{host} to host{peer}", ((host, peer),), min(limits)))
    return flows


def _rack_flows(network: EmulatedNetwork) -> list[_Flows]:
    """All hosts of a rack send to hosts of the next rack."""
    topology = network.topology
    racks = topology.racks
    if len(racks) == 1:
        return []
    slowed = topology.slow_host is not None and topology.slow_host.at_seconds == 0
    flows = []
    for rack, hosts in enumerate(racks):
        other = (rack + 1) % len(racks)
        pairs = tuple(zip(hosts, racks[other], strict=False))
        ends = [min(topology.rate_of(host, slowed=slowed) for host in pair) for pair in pairs]
        limits = (sum(ends), topology.rate_of_rack(rack), topology.rate_of_rack(other))
        flows.append(_Flows(f"rack{rack} to rack{other}", pairs, min(limits)))
    return flows


def _batches(flows: Sequence[_Flows]) -> Iterator[list[_Flows]]:
    batch: list[_Flows] = []
    for each in flows:
        full = sum(f.expected for f in batch) + each.expected > _BITS_AT_ONCE
        # A host must not receive from two hosts at once.
        meets = any(each.pairs[0][1] == other.pairs[0][1] for other in batch)
        if batch and (full or meets or len(batch) == _MAX_FLOWS):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _measured(network: EmulatedNetwork, batch: Sequence[_Flows]) -> list[MeasuredLink]:
    """Repeats measurements that deviate, since a busy machine sometimes disturbs them."""
    best: dict[str, MeasuredLink] = {}
    left = list(batch)
    for _ in range(_TRIES):
        for link in _measure(network, left):
            former = best.get(link.name)
            if former is None or _distance(link) < _distance(former):
                best[link.name] = link
        left = [flows for flows in left if best[flows.name].is_off]
        if not left:
            break
    return [best[flows.name] for flows in batch]


def _distance(link: MeasuredLink) -> float:
    return abs(link.bits_per_second - link.expected)


def _measure(network: EmulatedNetwork, batch: Sequence[_Flows]) -> list[MeasuredLink]:
    with contextlib.ExitStack() as stack:
        receivers = [
            [
                stack.enter_context(
                    _process(
                        network,
                        receiver,
                        "receive",
                        network.addresses[receiver],
                        str(_SECONDS),
                        str(_WARMUP),
                    )
                )
                for _, receiver in flows.pairs
            ]
            for flows in batch
        ]
        for flows, processes in zip(batch, receivers, strict=True):
            for (sender, receiver), process in zip(flows.pairs, processes, strict=True):
                arguments = ("send", network.addresses[receiver], _line(process))
                stack.enter_context(_process(network, sender, *arguments))
        return [
            MeasuredLink(
                flows.name,
                sum(float(_line(process)) for process in processes) * 8 * _FRAME_SHARE,
                flows.expected,
            )
            for flows, processes in zip(batch, receivers, strict=True)
        ]


@contextlib.contextmanager
def _process(
    network: EmulatedNetwork, host: int, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    command = network.command(host, [sys.executable, "-I", "-S", _FLOW, *arguments])
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LinksOffError("the emulated network carries no data: a measurement broke off")
    return line.strip()
