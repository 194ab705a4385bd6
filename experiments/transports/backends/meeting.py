"""How the ranks of a group find each other, and connect.

The job's store is what they have in common: over it they exchange a secret, which each connection
between them proves, and addresses. They listen on the loopback interface if all share a host.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from typing import Final, NamedTuple

from torch._C._distributed_c10d import Store

from ddltrace.tracer.connections.addresses import LOOPBACK, host_identity, own_address
from ddltrace.tracer.connections.proof import SECRET_BYTES, ProvenListener, connect_proven
from ddltrace.tracer.errors import MissingCapabilityError

JOIN_SECONDS: Final = 120.0
"""Longest time until the processes of a group are connected, once they have met."""


class Meeting(NamedTuple):
    """What the ranks of a group agree on.

    Attributes:
        secret: What each connection proves; fresh, and of this group only.
        address: The numeric address on which this rank listens.
        shares_host: Whether all ranks are on one host.
    """

    secret: bytes
    address: str
    shares_host: bool


def meet(store: Store, purpose: str, rank: int, size: int, timeout: timedelta) -> Meeting:
    """Waits until all ranks are here. Collective.

    Args:
        store: Where ranks find each other.
        purpose: Distinguishes meetings in one store.
        rank: This rank within the group.
        size: Ranks in the group.
        timeout: Longest time to wait for the others.

    Raises:
        RuntimeError: One did not come.
        MissingCapabilityError: A rank has another version of ddltrace.
    """
    version = metadata.version("ddltrace")
    record = {"version": version, "host": host_identity()}
    if rank == 0:
        record["secret"] = secrets.token_hex(SECRET_BYTES)
    store.set(f"{purpose}/{rank}", json.dumps(record))
    store.wait([f"{purpose}/{peer}" for peer in range(size)], timeout)
    hosts = set()
    secret = b""
    for peer in range(size):
        found = _read(store.get(f"{purpose}/{peer}"))
        if found.get("version") != version:
            raise MissingCapabilityError(
                f"rank {peer} has another version of ddltrace than rank {rank}, {version}: install "
                "the same version for all ranks"
            )
        hosts.add(found["host"])
        if peer == 0:
            secret = bytes.fromhex(found["secret"])
    shares_host = len(hosts) == 1
    return Meeting(secret, LOOPBACK if shares_host else own_address(), shares_host)


def exchange(store: Store, purpose: str, rank: int, size: int, own: str) -> dict[int, str]:
    """Exchanges a text with the other ranks of a group.

    Returns:
        Rank -> text, including this rank.
    """
    store.set(f"{purpose}/text/{rank}", own)
    return {peer: store.get(f"{purpose}/text/{peer}").decode() for peer in range(size)}


def connect_all(
    store: Store,
    purpose: str,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    each: int = 1,
    prepare: Callable[[socket.socket], object] | None = None,
) -> tuple[Meeting, dict[int, list[socket.socket]]]:
    """Connects each two ranks of a group: the higher rank of two connects to the lower. Collective.

    Args:
        store: Where ranks find each other.
        purpose: What the connections are for.
        rank: This rank within the group.
        size: Ranks in the group.
        timeout: Longest time to wait for the others to come.
        each: Connections between each two ranks.
        prepare: Sets options of a socket before it listens or connects.

    Returns:
        The meeting, and the proven connections to each other rank, in an order that both share.

    Raises:
        OSError: A rank does not connect.
    """
    meeting = meet(store, purpose, rank, size, timeout)
    listener = ProvenListener(meeting.address, meeting.secret, purpose, prepare=prepare)
    own = f"{meeting.address}:{listener.port}"
    addresses = exchange(store, purpose, rank, size, own)
    found: dict[int, list[socket.socket]] = {}
    try:
        for peer in range(rank):
            host, _, port = addresses[peer].rpartition(":")
            found[peer] = [
                connect_proven(
                    (host, int(port)),
                    meeting.secret,
                    purpose,
                    number=rank * each + index,
                    timeout_s=JOIN_SECONDS,
                    prepare=prepare,
                )
                for index in range(each)
            ]
        expected = range((rank + 1) * each, size * each)
        accepted = dict(listener.accept_each(expected, JOIN_SECONDS))
    finally:
        listener.close()
    for peer in range(rank + 1, size):
        found[peer] = [accepted[peer * each + index] for index in range(each)]
    return meeting, found


def exchange_lines(lines: dict[int, list[socket.socket]], texts: dict[int, str]) -> dict[int, str]:
    """Sends each other rank a line over its connection, and receives one from it.

    Raises:
        OSError: A connection ended.
    """
    for peer, text in texts.items():
        lines[peer][0].sendall(f"{text}\n".encode())
    return {peer: _line(lines[peer][0]) for peer in texts}


def _read(value: bytes) -> dict[str, str]:
    """What a rank has published; empty if another version has published something else."""
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise ConnectionError("a rank has ended while it was connected")
        received += part
    return received.decode().strip()
