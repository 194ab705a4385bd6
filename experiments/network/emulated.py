"""A network of one's own on one Linux machine: a namespace per host behind a shaped link.

Every host is a network namespace with one interface, joined by a veth pair to a bridge in a
namespace of its own, so nothing appears in the machine's own network and several such networks
do not meet. Both ends of each link are shaped by a token bucket filter: what a host sends, and
what the bridge sends to it. Needs root and iproute2.

All names carry the process id and start time of their owner, so that a later run can tell the
leftovers of a dead one and remove them.
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

from ddltrace.tracer.errors import MissingCapabilityError, UsageError

INTERFACE: Final = "eth0"
"""Name of the one interface that every host has."""

MAX_HOSTS: Final = 64
_SUBNET: Final = "10.77.0"
_PREFIX: Final = "ddltrace"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(?:h\d+|switch)\Z")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s|ps)?\Z", re.IGNORECASE)
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}
# What a link may send at once after a pause: as little as lets it reach its rate (a timer
# tick's worth of bytes), but never less than one segment that the kernel has not yet cut.
_BURST_SECONDS: Final = 0.005
_MIN_BURST_BYTES: Final = 70_000
_QUEUE: Final = "50ms"


def parse_bandwidth(text: str) -> int:
    """Reads a rate such as ``400mbit`` or ``2.5gbit``.

    Returns:
        Bits per second.

    Raises:
        UsageError: It is no rate, or none above zero.
    """
    match = _RATE.match(text.strip())
    bits = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if bits <= 0:
        raise UsageError(f"bandwidth {text!r:.40} is no rate: write for example 400mbit or 10gbit")
    return bits


def check_capabilities() -> None:
    """Makes sure that this process can make such a network.

    Raises:
        MissingCapabilityError: Says what is missing.
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
        hosts: Names of the hosts' namespaces, in order.
        addresses: Their IPv4 addresses.
    """

    def __init__(self, *, hosts: int, bits_per_second: int) -> None:
        """Describes the network; nothing is made yet.

        Args:
            hosts: Number of hosts, 2 to `MAX_HOSTS`.
            bits_per_second: Rate of every link, in each direction.

        Raises:
            UsageError: The number of hosts is out of range.
        """
        if not 2 <= hosts <= MAX_HOSTS:
            raise UsageError(f"--hosts must be 2 to {MAX_HOSTS}, not {hosts}")
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self._switch = f"{owner}-switch"
        self._bits_per_second = bits_per_second
        self.hosts = [f"{owner}-h{number}" for number in range(hosts)]
        self.addresses = [f"{_SUBNET}.{number + 1}" for number in range(hosts)]

    def __enter__(self) -> EmulatedNetwork:
        check_capabilities()
        remove_leftovers()
        try:
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
        _remove({self._switch, *self.hosts})

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            _ip("netns", "add", host)
            _ip(
                *("-n", host, "link", "add", INTERFACE, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            _ip("-n", host, "addr", "add", f"{self.addresses[number]}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", INTERFACE, "up")
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            self._shape(host, INTERFACE)
            self._shape(self._switch, port)

    def _shape(self, namespace: str, interface: str) -> None:
        burst = max(_MIN_BURST_BYTES, int(self._bits_per_second / 8 * _BURST_SECONDS))
        _run(
            *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
            *("rate", f"{self._bits_per_second}bit", "burst", f"{burst}b", "latency", _QUEUE),
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
        # Somebody else may remove the same leftovers at this moment.
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot: with its id, unique; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything.
    return int(stat.rpartition(")")[2].split()[19])


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise MissingCapabilityError(
            f"the emulated network cannot be made: `{' '.join(command)}` said: {reason:.200}"
        )
