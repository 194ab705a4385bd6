"""Numbers for messages whose format does not number them, and a check of those that do.

The same collective must carry the same (group, number) on all its ranks. Where a format has
no numbers the order within the group stands in for them, which holds as long as every rank's
record begins at the same collective; where training steps are known, counting starts at a
step that all ranks have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import memory_of
from ddltrace.analyzer.importers.communication import first_mismatch
from ddltrace.tracer.trace.arrow_arrays import integers
from ddltrace.tracer.trace.schema import EVENTS, P2P_OPS

_MAX_NOTES: Final = 8
Numbers = npt.NDArray[np.int64]
_UNKNOWN: Final = -1


@dataclass
class _Part:
    """The collectives of one group in one table, in the order in which they began."""

    segment: str
    rows: Numbers
    seq: Numbers
    step: Numbers
    ops: list[str]


def number_messages(
    tables: Mapping[str, pa.Table], ranks: Mapping[str, int], notes: list[str]
) -> dict[str, pa.Table]:
    """Gives every message its ``seq``, and its ``id`` in its table.

    Args:
        tables: Segment name -> events.
        ranks: Segment name -> rank.
        notes: Receives what was guessed and where ranks disagree.

    Returns:
        The tables with the columns ``seq`` and ``id`` filled.
    """
    groups: dict[str, list[_Part]] = defaultdict(list)
    seqs: dict[str, Numbers] = {}
    ids: dict[str, Numbers] = {}
    for segment, table in tables.items():
        seqs[segment] = np.full(table.num_rows, _UNKNOWN, dtype=np.int64)
        ids[segment] = np.full(table.num_rows, _UNKNOWN, dtype=np.int64)
        rows = _message_rows(table)
        ids[segment][rows] = np.arange(len(rows))
        for group, part in _collectives(table, segment, rows).items():
            groups[group].append(part)
        _number_pairs(table, rows, ranks[segment], seqs[segment])
    found: list[str] = []
    for group, parts in groups.items():
        _number_group(group, parts, ranks, seqs, found)
    notes.extend(found[:_MAX_NOTES])
    if len(found) > _MAX_NOTES:
        notes.append(f"{len(found) - _MAX_NOTES} more such notes on process groups are left out")
    return {
        segment: _with(_with(table, "seq", seqs[segment]), "id", ids[segment])
        for segment, table in tables.items()
    }


def _message_rows(table: pa.Table) -> Numbers:
    """Rows of the messages, by start."""
    kind = table["kind"].combine_chunks()
    values = kind.dictionary.to_pylist()
    if "message" not in values:
        return np.empty(0, dtype=np.int64)
    code = values.index("message")
    rows = np.flatnonzero(memory_of(kind.indices) == code)
    starts = memory_of(table["start_ns"].combine_chunks())[rows]
    ordered: Numbers = rows[np.argsort(starts, kind="stable")]
    return ordered


def _collectives(table: pa.Table, segment: str, rows: Numbers) -> dict[str, _Part]:
    part = table.select(["group", "op", "seq", "step"]).take(integers(rows))
    columns = part.to_pydict()
    places: dict[str, list[int]] = defaultdict(list)
    for place, (group, op) in enumerate(zip(columns["group"], columns["op"], strict=True)):
        if op not in P2P_OPS:
            places[group or ""].append(place)
    return {
        group: _Part(
            segment=segment,
            rows=rows[chosen],
            seq=_integers([columns["seq"][place] for place in chosen]),
            step=_integers([columns["step"][place] for place in chosen]),
            ops=[str(columns["op"][place]) for place in chosen],
        )
        for group, chosen in places.items()
    }


def _number_group(
    group: str,
    parts: list[_Part],
    ranks: Mapping[str, int],
    seqs: dict[str, Numbers],
    notes: list[str],
) -> None:
    if all(_is_numbered(part.seq) for part in parts):
        for part in parts:
            seqs[part.segment][part.rows] = part.seq
        _check_numbered(group, parts, ranks, notes)
        return
    first = _common_places(parts)
    for part, place in zip(parts, first, strict=True):
        seqs[part.segment][part.rows] = np.arange(len(part.rows)) - place + max(first)
    ordered = [part.ops[place:] for part, place in zip(parts, first, strict=True)]
    shown = group[:40]
    notes.append(f"group {shown!r}: its collectives have no number and are joined by their order")
    place_of_mismatch = first_mismatch(ordered)
    if place_of_mismatch is None:
        return
    described = _disagreement(parts, ordered, place_of_mismatch, ranks)
    notes.append(
        f"group {shown!r}: ranks disagree at collective {place_of_mismatch} ({described}); "
        "what follows may be joined wrongly"
    )


def _is_numbered(seq: Numbers) -> bool:
    return bool(np.all(seq >= 0)) and len(np.unique(seq)) == len(seq)


def _check_numbered(
    group: str, parts: list[_Part], ranks: Mapping[str, int], notes: list[str]
) -> None:
    """Notes the first number under which ranks did different things."""
    seen: dict[int, tuple[str, int]] = {}
    for part in parts:
        for seq, op in zip(part.seq.tolist(), part.ops, strict=True):
            other, rank = seen.setdefault(seq, (op, ranks[part.segment]))
            if other != op:
                notes.append(
                    f"group {group[:40]!r}: number {seq} is {other[:40]} on rank {rank} but "
                    f"{op[:40]} on rank {ranks[part.segment]}"
                )
                return


def _common_places(parts: list[_Part]) -> list[int]:
    """For each rank the place of the first collective in a step that all ranks have."""
    if any(not np.any(part.step >= 0) for part in parts):
        return [0] * len(parts)
    common = max(int(part.step[part.step >= 0].min()) for part in parts)
    return [int(np.argmax(part.step >= common)) for part in parts]


def _disagreement(
    parts: list[_Part], ordered: Sequence[Sequence[str]], place: int, ranks: Mapping[str, int]
) -> str:
    by_op: dict[str, int] = {}
    for part, ops in zip(parts, ordered, strict=True):
        by_op.setdefault(ops[place] if place < len(ops) else "none", ranks[part.segment])
    return ", ".join(f"{op[:40]} on rank {rank}" for op, rank in list(by_op.items())[:3])


def _number_pairs(table: pa.Table, rows: Numbers, rank: int, seq: Numbers) -> None:
    """Numbers sends and receives by their order between the same two ranks."""
    part = table.select(["group", "op", "peer", "tag"]).take(integers(rows)).to_pydict()
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    for place, op in enumerate(part["op"]):
        if op not in P2P_OPS or part["peer"][place] is None:
            continue
        pair = (rank, part["peer"][place])
        key = (part["group"][place], *(pair if op == "send" else pair[::-1]), part["tag"][place])
        seq[rows[place]] = counts[key, op]
        counts[key, op] += 1


def _integers(values: list[int | None]) -> Numbers:
    return np.array([_UNKNOWN if value is None else value for value in values], dtype=np.int64)


def _with(table: pa.Table, name: str, values: Numbers) -> pa.Table:
    column = integers(values, values == _UNKNOWN)
    return table.set_column(EVENTS.get_field_index(name), EVENTS.field(name), column)
