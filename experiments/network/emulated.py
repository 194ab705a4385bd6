"""Creates an emulated network on one Linux machine: a namespace per host behind a shaped link.

Every host is a network namespace with one interface, joined by a veth pair to the bridge of its
rack. The bridges of several racks are joined to the bridge of the core. Each bridge is in a
namespace of its own, so nothing appears in the machine's own network and several such networks
do not meet. Both ends of each link are shaped by a token bucket filter. Needs root and iproute2.

A separate cleanup process removes the network if its owner is killed. All names contain the process
id and start time of the owner, so that a later run can recognize and remove leftovers if the
cleanup process was killed, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from ddltrace.experiments.network.topology import Topology
from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.trace.liveness import START_TIME, stat_fields

INTERFACE: Final = "eth0"
"""Name of the single interface of every host."""

_SUBNET: Final = "10.77.0"
_PREFIX: Final = "ddltrace"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(?:h\d+|switch|rack\d+)\Z")
# Burst size of a link: the minimum with which it reaches its rate (the bytes of one timer tick),
# but at least one segment before segmentation by the kernel.
_BURST_SECONDS: Final = 0.005
_MIN_BURST_BYTES: Final = 70_000
_QUEUE: Final = "50ms"


def check_capabilities() -> None:
    """Checks that this process can create such a network.

    Raises:
        MissingCapabilityError: A capability is missing; the message names it.
    """
    if not sys.platform.startswith("linux"):
        raise MissingCapabilityError("--hosts needs Linux: it is made of network namespaces")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise MissingCapabilityError(
                f"--hosts needs the program {program!r}: install iproute2 "
                "(Debian, Ubuntu: apt-get install iproute2)"
            )
    if os.geteuid() != 0:
        raise MissingCapabilityError(
            "--hosts needs root for its network namespaces: run it with sudo, or leave --hosts out"
        )


class EmulatedNetwork:
    """A context manager: the network exists inside the ``with`` block.

    Attributes:
        topology: Description of the network.
        hosts: Names of the hosts' namespaces, in order.
        addresses: Their IPv4 addresses.
    """

    def __init__(self, topology: Topology) -> None:
        """Stores the description; creates nothing yet.

        Args:
            topology: Description of the network.
        """
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self.topology = topology
        self._core = f"{owner}-switch"
        racks = len(topology.racks)
        self._racks = [f"{owner}-rack{n}" for n in range(racks)] if racks > 1 else [self._core]
        self.hosts = [f"{owner}-h{number}" for number in range(topology.hosts)]
        self.addresses = [f"{_SUBNET}.{number + 1}" for number in range(topology.hosts)]
        self._cleanup_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedNetwork:
        check_capabilities()
        remove_leftovers()
        try:
            self._cleanup_process = _start_cleanup_process(self._namespaces)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *argv]

    def close(self) -> None:
        """Removes the network; interfaces go with their namespaces."""
        _remove(set(self._namespaces))
        if self._cleanup_process is not None and self._cleanup_process.stdin is not None:
            self._cleanup_process.stdin.close()
            self._cleanup_process.wait()

    def delay(self) -> None:
        """Adds the topology's delay and loss to what each host sends.

        Raises:
            MissingCapabilityError: The kernel does not support it.
        """
        topology = self.topology
        if not topology.delay_seconds and not topology.loss_percent:
            return
        for host in self.hosts:
            try:
                _run(
                    *("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "parent", "1:1"),
                    *("handle", "10:", "netem", "limit", "100000"),
                    *("delay", f"{topology.delay_seconds * 1e6:.0f}us"),
                    *("loss", f"{topology.loss_percent}%"),
                )
            except MissingCapabilityError as error:
                raise MissingCapabilityError(
                    "--delay and --loss need the kernel module sch_netem, which this kernel does "
                    "not have or may not load (Debian, Ubuntu: modprobe sch_netem, in the package "
                    f"linux-modules-extra or linux-image): {error}"
                ) from error

    def slow_down(self) -> None:
        """Reduces the rate of the slow host's link."""
        slow = self.topology.slow_host
        if slow is not None:
            rate = self.topology.rate_of(slow.host, slowed=True)
            self._shape(self.hosts[slow.host], INTERFACE, rate, "change")
            self._shape(self._rack_of(slow.host), f"port{slow.host}", rate, "change")

    @property
    def _namespaces(self) -> list[str]:
        return sorted({self._core, *self._racks, *self.hosts})

    def _rack_of(self, host: int) -> str:
        racks = self.topology.racks
        return next(name for name, hosts in zip(self._racks, racks, strict=True) if host in hosts)

    def _build(self) -> None:
        for bridge in sorted({self._core, *self._racks}):
            _ip("netns", "add", bridge)
            _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", bridge, "link", "set", "br0", "up")
        if len(self._racks) > 1:
            for number, rack in enumerate(self._racks):
                self._link_rack(number, rack)
        for number, host in enumerate(self.hosts):
            self._link_host(number, host)

    def _link_rack(self, number: int, rack: str) -> None:
        port = f"rack{number}"
        _ip(
            *("-n", rack, "link", "add", "uplink", "type", "veth"),
            *("peer", "name", port, "netns", self._core),
        )
        _ip("-n", rack, "link", "set", "uplink", "master", "br0", "up")
        _ip("-n", self._core, "link", "set", port, "master", "br0", "up")
        rate = self.topology.rate_of_rack(number)
        self._shape(rack, "uplink", rate)
        self._shape(self._core, port, rate)

    def _link_host(self, number: int, host: str) -> None:
        port, rack = f"port{number}", self._rack_of(number)
        _ip("netns", "add", host)
        _ip(
            *("-n", host, "link", "add", INTERFACE, "type", "veth"),
            *("peer", "name", port, "netns", rack),
        )
        _ip("-n", host, "addr", "add", f"{self.addresses[number]}/24", "dev", INTERFACE)
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", INTERFACE, "up")
        _ip("-n", rack, "link", "set", port, "master", "br0", "up")
        rate = self.topology.bits_per_second
        self._shape(host, INTERFACE, rate)
        self._shape(rack, port, rate)

    @staticmethod
    def _shape(namespace: str, interface: str, rate: int, verb: str = "add") -> None:
        burst = max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_SECONDS))
        _run(
            *("tc", "-n", namespace, "qdisc", verb, "dev", interface, "root", "handle", "1:"),
            *("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", _QUEUE),
        )


def _start_cleanup_process(namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts the process that removes the namespaces and their processes when this process ends.

    It waits for the end of a pipe whose other end only this process has.
    """
    script = (
        "trap '' INT TERM HUP; cat > /dev/null; "
        'for name in "$@"; do [ -e "/run/netns/$name" ] || continue; '
        'for pid in $(ip netns pids "$name" 2> /dev/null); do kill -9 "$pid"; done; '
        'ip netns del "$name"; done'
    )
    return subprocess.Popen(
        ["sh", "-c", script, "ddltrace-janitor", *namespaces],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def remove_leftovers() -> list[str]:
    """Removes the networks of runs whose process is gone.

    Returns:
        The names of the namespaces that were removed.
    """
    dead = {
        name
        for name in _existing()
        if (match := _NAME.match(name)) and _start_time(int(match[1])) != int(match[2])
    }
    _remove(dead)
    return sorted(dead)


def _existing() -> list[str]:
    directory = Path("/run/netns")
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _remove(names: set[str]) -> None:
    for name in names.intersection(_existing()):
        # Another process may remove the same leftovers concurrently.
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot: with its id, unique; None if it is gone."""
    try:
        return int(stat_fields(pid)[START_TIME])
    except OSError:
        return None


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise MissingCapabilityError(
            f"the emulated network cannot be made: `{' '.join(command)}` said: {reason:.200}"
        )
