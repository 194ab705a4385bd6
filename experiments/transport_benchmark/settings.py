"""The settings of the comparison, and the measured operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OPERATIONS: Final = {
    "ping_pong": "rank 0 sends to rank 1, which sends the same back: half of the time of both",
    "push_pull": "all other ranks send to rank 0, which adds and sends the sum back to each",
    "all_reduce": "a ring of sends and receives, the same for every library",
}
"""Operation -> description of one round."""


@dataclass(frozen=True)
class Settings:
    """Settings of one comparison.

    Attributes:
        transports: Names of the transports.
        ranks: Processes.
        sizes: Message sizes in bytes, ascending.
        rounds: Timed rounds of each size at most; large sizes get fewer.
        hosts: Hosts of an emulated network with one rank each; None for this machine's own.
        bandwidth: Rate of each host's link, such as ``400mbit``.
        timeout_s: Seconds after which a transport is ended and reported as hung.
        protocols: Protocols whose profiles pace the transport ``tcp``, each in a row of its own.
    """

    transports: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    hosts: int | None
    bandwidth: str | None
    timeout_s: float
    protocols: tuple[str, ...] = ()


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Powers of four from 4 bytes on, with `largest` as the last."""
    sizes = [4]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return (*sizes, largest) if largest > sizes[-1] else tuple(sizes)
