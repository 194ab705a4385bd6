"""What the ranks of a collective passed to it, where they disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, Columns
from ddltrace.analyzer.formatting.units import counted
from ddltrace.analyzer.joined.join import Joined

DUMPS: Final = "flight-recorder"
"""Source of traces that show what was in flight when the ranks wrote them: whatever has not
completed in them is reported, since a dump does not tell how long it continued."""

_EQUAL_INPUTS: Final = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
_EQUAL_OUTPUTS: Final = ("all_reduce", "reduce_scatter", "all_gather")


def pairs_that_disagree(joined: Joined) -> dict[int, int]:
    """Sends and the receives for them that expect another size: rows of messages.

    Where as many sends as receives between two ranks of a group lack the other side, they are of
    each other, in their order.
    """
    messages = joined.messages
    found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    alone = np.flatnonzero(messages.is_p2p & (joined.partner == NULL) & (messages.peer != NULL))
    for row in alone[np.argsort(messages.start[alone], kind="stable")].tolist():
        rank, peer = int(messages.rank[row]), int(messages.peer[row])
        is_send = messages.ops[messages.op[row]] == "send"
        key = int(messages.group[row]), *((rank, peer) if is_send else (peer, rank))
        found.setdefault(key, ([], []))[0 if is_send else 1].append(row)
    return {
        send: receive
        for sends, receives in found.values()
        if len(sends) == len(receives)
        for send, receive in zip(sends, receives, strict=True)
        if messages.bytes[send] != messages.out_bytes[receive]
        and NULL not in (messages.bytes[send], messages.out_bytes[receive])
    }


def sent_and_expected(joined: Joined, send: int, receive: int) -> dict[int, str]:
    """What the two ranks of a pair passed, each by its rank."""
    messages = joined.messages
    return {
        int(messages.rank[send]): f"sends {counted(int(messages.bytes[send]), 'byte')}",
        int(messages.rank[receive]): (
            f"receives {counted(int(messages.out_bytes[receive]), 'byte')}"
        ),
    }


def passed_by(
    windows: Iterable[pa.Table], wanted: set[tuple[str, int | None]]
) -> dict[tuple[str, int | None], Passed]:
    """What a rank passed to the collectives with these groups and numbers.

    Args:
        windows: Events of the rank.
        wanted: Groups and numbers.
    """
    seqs = [seq for _, seq in wanted if seq is not None]
    found: dict[tuple[str, int | None], Passed] = {}
    for table in windows:
        columns = Columns(table)
        rows = columns.rows("message")
        rows = rows[np.isin(columns.ints("seq", rows), seqs)]
        (groups, names), (types, type_names), (shapes, shape_texts) = (
            columns.codes(name, rows) for name in ("group", "dtype", "shapes")
        )
        names, type_names, shape_texts = [*names, ""], [*type_names, ""], [*shape_texts, ""]
        sizes, out_sizes = columns.ints("bytes", rows), columns.ints("out_bytes", rows)
        for place, number in enumerate(columns.ints("seq", rows).tolist()):
            key = names[groups[place]], number
            if key in wanted:
                found[key] = Passed(
                    type_names[types[place]],
                    shape_texts[shapes[place]],
                    int(sizes[place]),
                    int(out_sizes[place]),
                )
    return found


class Passed(NamedTuple):
    """What a rank passed to a collective; empty, or `NULL`, where it is not known."""

    dtype: str
    shapes: str
    bytes: int
    out_bytes: int

    def text(self, *, with_output: bool) -> str:
        """Describes it: ``float32 [[64,4]]``."""
        size = self.shapes or ("" if self.bytes == NULL else f"{self.bytes} bytes")
        output = f", output of {self.out_bytes} bytes" if with_output else ""
        return f"{self.dtype} {size}".strip() + output


def disagreement(op: str, passed: Mapping[int, Passed]) -> dict[int, str]:
    """What each rank passed to an operation, if that must be equal and is not."""
    each = list(passed.values())
    types = {one.dtype for one in each if one.dtype} if op != "barrier" else set()
    # Without shapes it is not known which sizes a recorder writes on ranks that only receive.
    shaped = all(one.shapes for one in each)
    inputs = {one.bytes for one in each if one.bytes != NULL}
    outputs = {one.out_bytes for one in each if one.out_bytes != NULL}
    compared = _EQUAL_INPUTS if shaped else _EQUAL_INPUTS[:3]
    inputs_differ = op in compared and len(inputs) > 1
    outputs_differ = shaped and op in _EQUAL_OUTPUTS and len(outputs) > 1
    unbalanced = (
        op == "all_to_all"
        and shaped
        and NULL not in {size for one in each for size in (one.bytes, one.out_bytes)}
        and sum(one.bytes for one in each) != sum(one.out_bytes for one in each)
    )
    if len(types) < 2 and not (inputs_differ or outputs_differ or unbalanced):
        return {}
    with_output = unbalanced or (outputs_differ and not inputs_differ)
    return {rank: one.text(with_output=with_output) for rank, one in passed.items()}
