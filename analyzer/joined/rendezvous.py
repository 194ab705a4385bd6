"""Whom a rank waits for in a collective, by library and operation.

A rank is released when the ranks that it needs have arrived:

| library | operation | a rank needs | known from |
|---|---|---|---|
| Gloo | broadcast | in a binomial tree: all from it to the root; its children | measured |
| Gloo | scatter, gather | a leaf: the root; the root: every leaf | measured |
| Gloo | all others | all ranks | measured |
| NCCL, others | all | all ranks, unless it leaves before the last one arrives | see below |

Gloo's transfers are rendezvous: a sender waits until its receiver has posted the buffer. So in a
broadcast a rank waits for a late child, too, and the root of a scatter for every leaf. (Measured
with PyTorch 2.13, 3 to 6 ranks, one of them 60 ms late, 16 B to 4 MB.)

NCCL moves data along rings and trees whose order a trace does not tell. All ranks of an all_reduce,
all_gather or reduce_scatter need all others. In a broadcast or reduce, a rank needs those before it
in the ring, and those behind it as soon as the buffers between them (NCCL_BUFFSIZE, 4 MiB a
channel) are full. So a rank that was still in the operation when the last one came counts as
released by that one; one that had left did not need it. The same is assumed of libraries that are
not known.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, IntArray, find

MAY_LEAVE: Final = ("broadcast", "scatter", "reduce", "gather", "send")
"""Operations that a rank may leave before the last rank has arrived."""

TREE: Final = "tree"
STAR: Final = "star"
GLOO: Final = {"broadcast": TREE, "scatter": STAR, "gather": STAR}
"""Gloo's operations in which a rank does not need all others; see the table."""


class Needs(NamedTuple):
    """Which other messages of its collective must have started before a message can proceed.

    Attributes:
        row: The messages that need single others, ascending, one entry for each that they need.
        needed: What each of them needs.
    """

    row: IntArray
    needed: IntArray

    @staticmethod
    def of_pairs(row: list[IntArray], needed: list[IntArray]) -> Needs:
        """The same from pairs in any order."""
        rows = np.concatenate(row)
        order = np.argsort(rows, kind="stable")
        return Needs(rows[order], np.concatenate(needed)[order])

    def of_started(self, start: IntArray, end: IntArray) -> Needs:
        """Those that started before the message that needs them ended; others were not needed."""
        ends = end[self.row]
        kept = (ends == NULL_NS) | (start[self.needed] <= ends)
        return Needs(self.row[kept], self.needed[kept])


def links(shape: str, place: IntArray, size: IntArray) -> IntArray:
    """The place of the rank that connects each rank with the root; `NULL` for the root.

    Args:
        shape: `TREE` or `STAR`.
        place: Each rank's place counted from the root: (group rank - root's) mod size.
        size: The number of ranks of the group.
    """
    if shape == STAR:
        return np.where(place == 0, NULL, np.zeros_like(place))
    # In Gloo's binomial tree, the parent is the place without its highest bit.
    highest = np.zeros_like(place)
    bit = 1
    while bit < int(size.max(initial=0)):
        highest[(place & bit) != 0] = bit
        bit <<= 1
    return np.where(place == 0, NULL, place - highest)


def last_needed(needs: Needs, start: IntArray) -> IntArray:
    """For each message, the one that starts last of itself and those that it needs."""
    last = np.arange(len(start))
    order = np.lexsort((start[needs.needed], needs.row))
    row, needed = needs.row[order], needs.needed[order]
    final = np.append(row[1:] != row[:-1], True)[: len(row)]
    row, needed = row[final], needed[final]
    later = start[needed] > start[row]
    last[row[later]] = needed[later]
    return last


def places(members: tuple[int, ...], rank: IntArray) -> IntArray:
    """The group rank of each global rank; `NULL` for what is not a member."""
    return find(rank, np.array(members, dtype=np.int64))


def is_gloo(backend: str, device: str) -> bool:
    """Whether the messages of a group on a kind of device are Gloo's.

    Args:
        backend: As PyTorch names it: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``.
        device: ``cpu`` or ``cuda``.
    """
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return by_device.get(device, backend) == "gloo"
