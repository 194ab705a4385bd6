"""Dumps of PyTorch's Flight Recorder: the last collectives of each rank, often after a hang.

The recorder notes when a collective was issued. When it completed it notes only if its
watchdog saw it, and then with the watchdog's coarse clock; what a dump does not tell stays
open here.
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
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, ImportedTrace
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.rank_files import assign_ranks
from ddltrace.analyzer.importers.rows import Row, table_of
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.schema import P2P_OPS
from ddltrace.tracer.store import GroupInfo, RankInfo, RunInfo, segment_name

NAME: Final = "flight-recorder"

_JSON_MARKS: Final = re.compile(
    rb'"(?:collective_seq_id|profiling_name|comm_lib_version|nccl_version)"\s*:'
)
_PAIR: Final = re.compile(r"\b\d+\s*(?:->|<-)\s*(\d+)")
_MAX_ENTRIES: Final = 1 << 22


def recognizes(head: bytes) -> bool:
    """Whether a file that begins so may be a dump: a pickle, or the recorder's JSON."""
    if head.startswith(plain_pickle.MAGIC):
        return b"entries" in head or b"pg_config" in head or b"version" in head
    return head.lstrip().startswith(b"{") and _JSON_MARKS.search(head) is not None


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the dumps of a job, one file per rank.

    Raises:
        TraceError: A file is no dump, asks for code, or no file holds an entry.
    """
    run = RunInfo(status="partial", level="comm", source=NAME)
    ranks = assign_ranks([None] * len(paths), [path.name for path in paths], run.notes)
    tables = {}
    unusable = 0
    for rank, path in sorted(zip(ranks, paths, strict=True)):
        dump = _load(path)
        rows, left_out = _rows(dump)
        unusable += left_out
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            status="complete",
            level="comm",
            clock_domain=f"host of rank {rank}",
            groups=_groups(dump, rows),
            versions=_versions(dump),
            events=len(rows),
        )
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
    if world > len(run.ranks):
        run.notes.append(f"{world - len(run.ranks)} of {world} ranks have no dump")
    if unusable:
        run.notes.append(f"{unusable} entries without an operation or a time are left out")
    run.notes.append(
        "a Flight Recorder dump holds the last collectives only; completions are when its "
        "watchdog noticed them, so durations are upper bounds"
    )
    by_segment = {info.segment: info.rank for info in run.ranks}
    return ImportedTrace(run, number_messages(tables, by_segment, run.notes))


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        is_pickle = file.read(1) == plain_pickle.MAGIC
    if is_pickle:
        dump = plain_pickle.load(path)
    else:
        try:
            if path.stat().st_size > plain_pickle.MAX_BYTES:
                raise TraceError(f"{path} is larger than any dump")
            dump = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{path} is damaged: {error!s:.100}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise TraceError(f"{path} is no dump of the Flight Recorder: it has no entries")
    return dump


def _rows(dump: dict[str, Any]) -> tuple[list[Row], int]:
    rows = []
    left_out = 0
    for entry in dump.get("entries", [])[:_MAX_ENTRIES]:
        row = _row(entry) if isinstance(entry, dict) else None
        if row is None:
            left_out += 1
        else:
            rows.append(row)
    return rows, left_out


def _row(entry: dict[str, Any]) -> Row | None:
    created = _time(entry.get("time_created_ns"))
    name = entry.get("profiling_name")
    if created is None or not isinstance(name, str):
        return None
    op = public_op(name) or clean(name, 60)
    is_pair = op in P2P_OPS
    completed = _time(entry.get("time_discovered_completed_ns"))
    dtype, sent = _bytes(entry, "input")
    _, received = _bytes(entry, "output")
    peer = int(pair.group(1)) if is_pair and (pair := _PAIR.search(name)) else None
    done = completed is not None or entry.get("retired") is True
    return Row(
        start_ns=created,
        end_ns=None if completed is None else max(completed, created),
        kind="message",
        name=clean(name),
        lane=f"comm/{_group_of(entry)}",
        op=op,
        group=_group_of(entry),
        seq=None if is_pair else count(entry.get("collective_seq_id")),
        peer=peer if peer is not None and peer < 1 << 31 else None,
        bytes=None if op == "recv" else sent,
        out_bytes=None if op == "send" else received,
        dtype=None if dtype is None else clean(dtype, 40),
        enqueue_ns=created,
        status="ok" if done else "open",
    )


def _group_of(entry: dict[str, Any]) -> str:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, (list, tuple)) and group else "0"
    return clean(name, 200)


def _groups(dump: dict[str, Any], rows: list[Row]) -> list[GroupInfo]:
    configured = dump.get("pg_config")
    known: dict[str, GroupInfo] = {}
    for key, value in configured.items() if isinstance(configured, dict) else ():
        if isinstance(value, dict):
            name = clean(value.get("name") or key, 200)
            text = value.get("desc")
            known[name] = GroupInfo(
                name, clean(text, 200) if text else "", "", members(value.get("ranks"))
            )
    used = dict.fromkeys(row.group for row in rows if row.group is not None)
    # With a single configured group the entries can only be of that one, whatever its name.
    only = next(iter(known.values())) if len(known) == 1 and len(used) <= 1 else None
    unknown = GroupInfo("", "", "", ())
    return [
        GroupInfo(name, source.description, "", source.ranks)
        for name in used
        for source in [known.get(name) or only or unknown]
    ]


def _note_status(dump: dict[str, Any], rank: int, run: RunInfo) -> None:
    """Keeps what the recorder says of each group: on a hang, ranks differ in it."""
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
    """Element type and bytes of an entry's inputs or outputs."""
    types, sizes = entry.get(f"{side}_dtypes"), entry.get(f"{side}_sizes")
    if not isinstance(types, (list, tuple)) or not types or not sizes:
        return None, None
    dtype, width = element_type(types[0])
    return dtype, size_of(elements_of(sizes), width)


def _time(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < MAX_TIME_NS else None
