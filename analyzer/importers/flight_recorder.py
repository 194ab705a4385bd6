"""Dumps of PyTorch's Flight Recorder: the last collectives of each rank, often after a hang.

The recorder stores when a collective was issued. It stores the completion only if its watchdog
observed it, with the coarse clock of the watchdog. Collectives without a completion in the dump
stay open.

Operations that were issued as one (``batch_isend_irecv``, coalesced collectives) have an entry
each, and behind them one whose name ends in ``coalesced``. All have the same number, and only the
last one is ever completed, so its completion counts for all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ddltrace.analyzer.importers import plain_pickle
from ddltrace.analyzer.importers.communication import (
    count,
    element_type,
    elements_of,
    members,
    public_op,
    size_of,
)
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, ImportedTrace, Row, table_of
from ddltrace.analyzer.importers.memory_limit import check_memory
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.rank_files import assign_ranks
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.storage.plain_files import open_given
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import P2P_OPS
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "flight-recorder"

_JSON_MARKS: Final = re.compile(
    rb'"(?:collective_seq_id|profiling_name|comm_lib_version|nccl_version)"\s*:'
)
_PAIR: Final = re.compile(r"\b\d+\s*(?:->|<-)\s*(\d+)")
_TOGETHER: Final = "coalesced"
_ENTRY_BYTES: Final = 64
"""Minimum size of an entry in a dump, unless one object is repeated."""

_SHOWN_SHAPES: Final = 16
_SHAPES_LENGTH: Final = 200

_ROW_BYTES: Final = 800
"""Memory of the row of an entry."""

_FREE_ITEMS: Final = 1 << 16
"""Number of entries, and of list items, that a dump of any size may contain."""

_SIDES: Final = ("input", "output")
_LISTS: Final = ("sizes", "dtypes")
_TIMES: Final = (
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)


def recognizes(head: bytes) -> bool:
    """Whether a file with this head may be a dump: a pickle, or the recorder's JSON."""
    if head.startswith(plain_pickle.MAGIC):
        return b"entries" in head or b"pg_config" in head or b"version" in head
    return head.lstrip().startswith(b"{") and _JSON_MARKS.search(head) is not None


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the dumps of a job, one file per rank.

    Raises:
        TraceError: A file is not a dump, asks for code, or no file holds an entry.
    """
    run = RunInfo(status="partial", level="comm", source=NAME)
    ranks = assign_ranks([None] * len(paths), paths, run.notes)
    tables = {}
    unusable = 0
    for rank, path in sorted(zip(ranks, paths, strict=True)):
        dump = _load(path)
        configured = _configured(dump)
        rows, left_out = _rows(dump, configured)
        unusable += left_out
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            status="complete",
            level="comm",
            clock_domain=f"host of rank {rank}",
            groups=_groups(configured, rows, _timeouts(dump)),
            versions=_versions(dump),
            dropped=_overwritten(dump),
        )
        rows += _latest(dump, rows)
        info.events = len(rows)
        if rows:
            first = min(row.start_ns for row in rows)
            info.clock = {"monotonic_ns": first, "unix_ns": first, "samples": []}
        run.ranks.append(info)
        tables[info.segment] = table_of(rows)
        _note_status(dump, rank, run)
    if not any(table.num_rows for table in tables.values()):
        raise TraceError(f"{paths[0]}: the recorder holds no collective (was it switched on?)")
    world = max(
        max(info.rank for info in run.ranks) + 1,
        *(max(group.ranks, default=0) + 1 for info in run.ranks for group in info.groups),
    )
    for info in run.ranks:
        info.world_size = world
    if silent := world - len(run.ranks):
        run.notes.append(f"{silent} of {world} ranks {agreeing(silent, 'has')} no dump")
    if unusable:
        run.notes.append(f"{counted(unusable, 'entry')} without an operation or a time left out")
    run.notes.append(
        "a Flight Recorder dump holds the last collectives only; completions are when its "
        "watchdog noticed them, so durations are upper bounds"
    )
    run.notes.append(
        "what had not completed when the ranks wrote their dumps is listed as hanging: in dumps of "
        "a job that works, it was in flight"
    )
    return number_messages(run, tables)


def _load(path: Path) -> dict[str, Any]:
    with open_given(path) as file:
        is_pickle = file.read(1) == plain_pickle.MAGIC
    dump = plain_pickle.load(path) if is_pickle else _load_json(path)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise TraceError(f"{path} is not a dump of the Flight Recorder: it has no entries")
    _check_repeats(path, dump)
    return dump


def _load_json(path: Path) -> Any:
    try:
        if path.stat().st_size > plain_pickle.MAX_BYTES:
            raise TraceError(f"{path} is larger than any dump")
        with open_given(path) as file:
            content = file.read()
        # Python's objects: a list or a mapping takes 80 bytes and more, a text 60.
        containers, texts = content.count(b"[") + content.count(b"{"), content.count(b'"') // 2
        check_memory(path, 3 * len(content) + 80 * containers + 60 * texts, len(content))
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged: {error!s:.100}") from error


def _check_repeats(path: Path, dump: dict[str, Any]) -> None:
    """Checks that the number of entries and items of a dump is plausible for the size of its file.

    A pickle can name one object any number of times, in two bytes each. What is read of a dump
    is linear in its file only if that is bounded.

    Raises:
        TraceError: It holds more entries, or more items in their lists, than the limits.
    """
    size = path.stat().st_size
    entries = dump.get("entries", [])
    limit = max(_FREE_ITEMS, size // _ENTRY_BYTES)
    if len(entries) > limit:
        raise TraceError(
            f"{path} holds {len(entries)} entries, more than the limit of one in {_ENTRY_BYTES} "
            f"bytes of the file ({limit})"
        )
    check_memory(path, len(entries) * _ROW_BYTES, size)
    configured = dump.get("pg_config")
    groups = list(configured.values()) if isinstance(configured, dict) else []
    holders = [
        *((entry, f"{side}_{what}") for entry in entries for side in _SIDES for what in _LISTS),
        *((group, "ranks") for group in groups),
    ]
    lists = (holder.get(name) for holder, name in holders if isinstance(holder, dict))
    items = sum(len(each) for each in lists if isinstance(each, (list, tuple)))
    limit = max(_FREE_ITEMS, size)
    if items > limit:
        raise TraceError(
            f"{path}: its shapes, types and group members are {items} items, more than the limit "
            f"of one in a byte of the file ({limit})"
        )


def _rows(dump: dict[str, Any], groups: dict[str, GroupInfo]) -> tuple[list[Row], int]:
    entries = dump.get("entries", [])
    usable = [entry for entry in entries if isinstance(entry, dict) and _is_usable(entry)]
    rows = []
    for together in _issued_together(usable):
        *inner, last = together
        if not inner:
            rows.append(_row(last, last, groups))
        elif last.get("is_p2p") is True:
            rows += [_row(entry, last, groups) for entry in inner]
        else:
            rows.append(_one_row([_row(entry, last, groups) for entry in inner], last))
    return rows, len(entries) - len(usable)


def _is_usable(entry: dict[str, Any]) -> bool:
    name = entry.get("profiling_name")
    return isinstance(name, str) and _time(entry.get("time_created_ns")) is not None


def _issued_together(entries: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Entries in order; those of one coalesced call in one list, the one that completes last."""
    pending: dict[str, list[dict[str, Any]]] = {}
    numbers: dict[str, Any] = {}
    found: list[list[dict[str, Any]]] = []
    for entry in entries:
        group, number = _group_of(entry), _number_of(entry)
        if number is None or numbers.get(group) != number:
            found += [[each] for each in pending.pop(group, ())]
        numbers[group] = number
        together = pending.setdefault(group, [])
        together.append(entry)
        if len(together) > 1 and entry["profiling_name"].endswith(_TOGETHER):
            found.append(pending.pop(group))
            numbers.pop(group)
    return found + [[each] for together in pending.values() for each in together]


def _number_of(entry: dict[str, Any]) -> tuple[bool, int] | None:
    """What the entries of one coalesced call share. Before 2.0 there was one count for both."""
    is_pair = entry.get("is_p2p") is True
    key = "p2p_seq_id" if is_pair else "collective_seq_id"
    number = count(entry.get(key, entry.get("seq_id")))
    return None if number is None else (is_pair, number)


def _one_row(inner: list[Row], last: dict[str, Any]) -> Row:
    """The message that coalesced collectives are: the first one's row with all of their bytes."""
    row = inner[0]
    ops = {each.op for each in inner}
    row.op = row.op if len(ops) == 1 else _TOGETHER
    row.name = clean(f"{inner[0].name} ({len(inner)} {_TOGETHER})")
    row.shapes = row.shapes if len(inner) == 1 else None
    row.bytes = _sum([each.bytes for each in inner])
    row.out_bytes = _sum([each.out_bytes for each in inner])
    row.dtype = row.dtype if len({each.dtype for each in inner}) == 1 else None
    number = _number_of(last)
    row.seq = None if number is None else number[1]
    return row


def _sum(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return count(sum(known)) if len(known) == len(sizes) else None


def _row(entry: dict[str, Any], completing: dict[str, Any], groups: dict[str, GroupInfo]) -> Row:
    """The message of an entry; `completing` is the entry with its completion time."""
    created = _time(entry["time_created_ns"])
    assert created is not None
    name, group = entry["profiling_name"], _group_of(entry)
    op = public_op(name) or clean(name, 60)
    is_pair = op in P2P_OPS
    completed = _time(completing.get("time_discovered_completed_ns"))
    dtype, sent = _bytes(entry, "input")
    _, received = _bytes(entry, "output")
    done = (
        completed is not None
        or completing.get("retired") is True
        or completing.get("state") == "completed"
    )
    number = _number_of(entry)
    return Row(
        start_ns=created,
        end_ns=None if completed is None else max(completed, created),
        kind="message",
        name=clean(name),
        lane=f"comm/{group}",
        op=op,
        group=group,
        seq=None if is_pair or number is None else number[1],
        peer=_peer(name, groups.get(group)) if is_pair else None,
        bytes=None if op == "recv" else sent,
        out_bytes=None if op == "send" else received,
        dtype=None if dtype is None else clean(dtype, 40),
        shapes=_shapes(entry),
        enqueue_ns=created,
        status="ok" if done else "open",
    )


def _peer(name: str, group: GroupInfo | None) -> int | None:
    """The global rank of the other side, which is named by its place in the group."""
    pair = _PAIR.search(name)
    if pair is None:
        return None
    place = int(pair.group(1)[:10])
    if group is not None and group.ranks:
        ranks = sorted(group.ranks)
        return ranks[place] if place < len(ranks) else None
    return place if place < 1 << 31 else None


def _group_of(entry: dict[str, Any]) -> str:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, (list, tuple)) and group else "0"
    return clean(name, 200)


def _configured(dump: dict[str, Any]) -> dict[str, GroupInfo]:
    configured = dump.get("pg_config")
    known: dict[str, GroupInfo] = {}
    for key, value in configured.items() if isinstance(configured, dict) else ():
        if isinstance(value, dict):
            name = clean(value.get("name") or key, 200)
            text = value.get("desc")
            known[name] = GroupInfo(
                name, clean(text, 200) if text else "", "", members(value.get("ranks"))
            )
    return known


def _groups(
    known: dict[str, GroupInfo], rows: list[Row], timeouts: dict[str, int]
) -> list[GroupInfo]:
    used = dict.fromkeys(row.group for row in rows if row.group is not None)
    # With a single configured group the entries can only be of that one, whatever its name.
    only = next(iter(known.values())) if len(known) == 1 and len(used) <= 1 else None
    unknown = GroupInfo("", "", "", ())
    return [
        GroupInfo(name, source.description, "", source.ranks, timeouts.get(name))
        for name in used
        for source in [known.get(name) or only or unknown]
    ]


def _timeouts(dump: dict[str, Any]) -> dict[str, int]:
    """Timeout of each group, milliseconds: the one of its last collective."""
    timeouts = {}
    for entry in dump.get("entries", []):
        if isinstance(entry, dict) and (timeout := count(entry.get("timeout_ms"))):
            timeouts[_group_of(entry)] = min(timeout, MAX_TIME_NS // 1_000_000)
    return timeouts


def _overwritten(dump: dict[str, Any]) -> int:
    """Entries that the recorder has overwritten: they are numbered from 0, in some files from 1."""
    entries = dump.get("entries", [])
    first = count(entries[0].get("record_id")) if entries and isinstance(entries[0], dict) else None
    return min(first, 1 << 52) if first is not None and first > 1 else 0


def _latest(dump: dict[str, Any], rows: list[Row]) -> list[Row]:
    """A marker at the latest time in a dump, if no message starts or ends there.

    A dump does not say when it was written. Its latest time, such as when its watchdog saw a
    collective begin, is the last one at which its rank is known to have waited.
    """
    times = [
        at
        for entry in dump.get("entries", [])
        if isinstance(entry, dict)
        for key in _TIMES
        if (at := _time(entry.get(key))) is not None
    ]
    latest = max(times, default=None)
    if latest is None or any(max(row.start_ns, row.end_ns or 0) >= latest for row in rows):
        return []
    return [Row(latest, latest, "marker", "latest time in the dump", "dump")]


def _note_status(dump: dict[str, Any], rank: int, run: RunInfo) -> None:
    """Keeps the recorder's status of each group, in which ranks differ in a hang."""
    status = dump.get("pg_status")
    if not isinstance(status, dict):
        return
    kept = {}
    for key, value in list(status.items())[:1024]:
        if isinstance(value, dict):
            kept[clean(key, 200)] = {
                clean(name, 60): number
                for name, number in list(value.items())[:16]
                if type(number) is int and abs(number) < MAX_TIME_NS
            }
    run.labels.setdefault("flight_recorder_status", {})[str(rank)] = kept


def _versions(dump: dict[str, Any]) -> dict[str, str]:
    wanted = {"nccl": "nccl_version", "communication library": "comm_lib_version"}
    return {
        name: clean(dump[key], 60)
        for name, key in wanted.items()
        if isinstance(dump.get(key), str) and dump[key]
    }


def _bytes(entry: dict[str, Any], side: str) -> tuple[str | None, int | None]:
    """Element type and bytes of an entry's inputs or outputs; no type where they have several."""
    types, sizes = entry.get(f"{side}_dtypes"), entry.get(f"{side}_sizes")
    if not isinstance(types, (list, tuple)) or not types or not isinstance(sizes, (list, tuple)):
        return None, None
    dtype, width = element_type(types[0])
    if not sizes:
        return None, None
    if len(types) == 1 or len(types) != len(sizes) or types.count(types[0]) == len(types):
        return dtype, size_of(elements_of(sizes), width)
    parts = zip(types, sizes, strict=True)
    return None, _sum([size_of(elements_of(size), element_type(name)[1]) for name, size in parts])


def _shapes(entry: dict[str, Any]) -> str | None:
    """The shapes of an entry's inputs as JSON; None if they are damaged, or too many to show."""
    sizes = entry.get("input_sizes")
    if not isinstance(sizes, (list, tuple)) or elements_of(sizes) is None:
        return None
    text = json.dumps(sizes, separators=(",", ":")) if len(sizes) <= _SHOWN_SHAPES else ""
    return text if 0 < len(text) <= _SHAPES_LENGTH else None


def _time(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < MAX_TIME_NS else None
