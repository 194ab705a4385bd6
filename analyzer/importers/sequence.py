"""Numbers messages of formats without sequence numbers, and checks existing numbers.

The same collective must carry the same (group, number) on all its ranks. Where a format has
no numbers, the ranks' records of a group are aligned by operation, size, order and time
(`ddltrace.analyzer.events.sequence_alignment`): a collective that some rank lacks, or that it
has with another operation or size, gets a number of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import distinct, memory_of
from ddltrace.analyzer.events.sequence_alignment import call_tokens, common_numbers
from ddltrace.analyzer.events.time_alignment import Calls
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.arrow_arrays import integers
from ddltrace.tracer.trace.run_info import RunInfo
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
    bytes: Numbers
    out_bytes: Numbers
    time: Numbers


def number_messages(run: RunInfo, tables: Mapping[str, pa.Table]) -> ImportedTrace:
    """Gives every message its ``seq``, and its ``id`` in its table.

    Args:
        run: The record of the run; receives notes on guesses and on disagreements between ranks.
        tables: Segment name -> events, whose columns ``seq`` and ``id`` are to be filled.
    """
    ranks = {info.segment: info.rank for info in run.ranks}
    groups: dict[str, list[_Part]] = defaultdict(list)
    pairs: dict[_Pair, dict[str, _Side]] = {}
    seqs: dict[str, Numbers] = {}
    ids: dict[str, Numbers] = {}
    for segment, table in tables.items():
        seqs[segment] = np.full(table.num_rows, _UNKNOWN, dtype=np.int64)
        ids[segment] = np.full(table.num_rows, _UNKNOWN, dtype=np.int64)
        rows = _message_rows(table)
        ids[segment][rows] = np.arange(len(rows))
        for group, part in _collectives(table, segment, rows).items():
            groups[group].append(part)
        _add_pairs(table, rows, segment, ranks[segment], pairs)
    _number_pairs(pairs, seqs)
    found: list[str] = []
    for group, parts in groups.items():
        _number_group(group, parts, ranks, seqs, found)
    run.notes.extend(found[:_MAX_NOTES])
    if len(found) > _MAX_NOTES:
        run.notes.append(
            f"{len(found) - _MAX_NOTES} more such notes on process groups are left out"
        )
    numbered = {
        segment: _with(_with(table, "seq", seqs[segment]), "id", ids[segment])
        for segment, table in tables.items()
    }
    return ImportedTrace(run, numbered)


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
    names = ["group", "op", "seq", "step", "bytes", "out_bytes"]
    part = table.select(names).take(integers(rows))
    ends = pc.coalesce(table["end_ns"], table["start_ns"]).combine_chunks()
    times = memory_of(ends)[rows]
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
            bytes=_integers([columns["bytes"][place] for place in chosen]),
            out_bytes=_integers([columns["out_bytes"][place] for place in chosen]),
            time=times[chosen],
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
    shown = group[:40]
    if len(parts) > 1:
        notes.append(
            f"group {shown!r}: its collectives have no number and are joined by operation, size "
            "and order"
        )
    numbers = common_numbers(_calls(parts))
    for part, its in zip(parts, numbers, strict=True):
        seqs[part.segment][part.rows] = its
    disagreement = _disagreement(parts, numbers, ranks)
    if disagreement:
        notes.append(f"group {shown!r}: {disagreement}")


def _calls(parts: list[_Part]) -> list[Calls]:
    """What the alignment compares."""
    names = sorted({op for part in parts for op in part.ops})
    code = {name: number for number, name in enumerate(names)}
    ops = [np.array([code[op] for op in part.ops], np.int64) for part in parts]
    tokens = call_tokens(
        ops, [part.bytes for part in parts], [part.out_bytes for part in parts], names
    )
    return [Calls(token, part.time, part.step) for token, part in zip(tokens, parts, strict=True)]


def _is_numbered(seq: Numbers) -> bool:
    return bool(np.all(seq >= 0)) and len(distinct(seq)) == len(seq)


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


def _disagreement(
    parts: list[_Part], numbers: list[Numbers], ranks: Mapping[str, int]
) -> str | None:
    """What ranks disagree on from the first step on that all of them have; None if on nothing."""
    start = 0
    if all(np.any(part.step >= 0) for part in parts):
        common = max(int(part.step[part.step >= 0].min()) for part in parts)
        start = min(
            int(its[np.argmax(part.step >= common)])
            for part, its in zip(parts, numbers, strict=True)
        )
    counts = np.bincount(np.concatenate(numbers))
    lacking = start + np.flatnonzero(counts[start:] < len(parts))
    if not len(lacking):
        return None
    first = int(lacking[0])
    by_op: dict[str, int] = {}
    for part, its in zip(parts, numbers, strict=True):
        place = int(np.searchsorted(its, first))
        has = place < len(its) and its[place] == first
        by_op.setdefault(part.ops[place] if has else "none", ranks[part.segment])
    described = ", ".join(f"{op[:40]} on rank {rank}" for op, rank in list(by_op.items())[:3])
    return (
        f"ranks disagree at collective {first} ({described}); {len(lacking)} of "
        f"{counted(len(counts) - start, 'collective')} {agreeing(len(lacking), 'is')} not on all "
        "of them and left out of all times"
    )


@dataclass
class _Side:
    """The sends, or the receives, between two ranks under one tag, in order."""

    op: str
    segment: str
    rows: list[int]
    size: list[int]
    time: list[int]


_Pair = tuple[Any, Any, Any, Any]
"""Group, source, destination, tag."""


def _add_pairs(
    table: pa.Table, rows: Numbers, segment: str, rank: int, pairs: dict[_Pair, dict[str, _Side]]
) -> None:
    """Adds a table's sends and receives to those between the same ranks."""
    names = ["group", "op", "peer", "tag", "bytes", "out_bytes", "end_ns", "start_ns"]
    part = table.select(names).take(integers(rows)).to_pydict()
    for place, op in enumerate(part["op"]):
        if op not in P2P_OPS or part["peer"][place] is None:
            continue
        pair = (rank, part["peer"][place])
        key = (part["group"][place], *(pair if op == "send" else pair[::-1]), part["tag"][place])
        side = pairs.setdefault(key, {}).setdefault(op, _Side(op, segment, [], [], []))
        side.rows.append(int(rows[place]))
        size = part["bytes" if op == "send" else "out_bytes"][place]
        side.size.append(_UNKNOWN if size is None else size)
        end = part["end_ns"][place]
        side.time.append(part["start_ns"][place] if end is None else end)


def _number_pairs(pairs: dict[_Pair, dict[str, _Side]], seqs: dict[str, Numbers]) -> None:
    """Numbers sends and receives: by their order, unless their sizes show that some are missing."""
    for sides in pairs.values():
        found = list(sides.values())
        numbers = [np.arange(len(side.rows)) for side in found]
        known = all(size > 0 for side in found for size in side.size)
        if len(found) > 1 and known and found[0].size != found[1].size:
            sizes = [np.array(side.size, np.int64) for side in found]
            none = [np.zeros(len(size), np.int64) for size in sizes]
            tokens = call_tokens(none, sizes, sizes, ["send"])
            numbers = common_numbers(
                [
                    Calls(token, np.array(side.time, np.int64), np.full(len(token), _UNKNOWN))
                    for token, side in zip(tokens, found, strict=True)
                ]
            )
        for side, its in zip(found, numbers, strict=True):
            seqs[side.segment][side.rows] = its


def _integers(values: list[int | None]) -> Numbers:
    return np.array([_UNKNOWN if value is None else value for value in values], dtype=np.int64)


def _with(table: pa.Table, name: str, values: Numbers) -> pa.Table:
    column = integers(values, values == _UNKNOWN)
    return table.set_column(EVENTS.get_field_index(name), EVENTS.field(name), column)
