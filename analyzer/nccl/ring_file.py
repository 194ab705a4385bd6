"""Reads a ring, the file in which the profiler plugin records the events of one process.

`tracer/nccl/ring.h` describes the file. It may be written while it is read, be cut off, or come
from a stranger: each record is checked, and what does not fit is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.nccl.event_kinds import KINDS
from ddltrace.tracer.nccl.job_rings import MAGIC
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import open_given

_VERSION: Final = 1
_PENDING: Final = np.uint64(1 << 63)
_MAX_RECORDS: Final = 1 << 26
_MAX_BYTES: Final = (1 << 20) + _MAX_RECORDS * 152
_MAX_RANK: Final = 1 << 24
_NAMES_AT: Final = 4096
_NUM_NAMES: Final = 256
_NUM_COMMS: Final = 1024

_HEADER: Final = np.dtype(
    [
        *(("magic", "S8"), ("version", "<u4"), ("record_bytes", "<u4"), ("capacity", "<u4")),
        *(("rank", "<i4"), ("pid", "<i4"), ("records_at", "<u4"), ("opened_ns", "<u8")),
        *(("opened_unix_ns", "<u8"), ("host", "S64"), ("boot_id", "S40"), ("control", "<u4")),
        *(("open_comms", "<u4"), ("claimed", "<u8"), ("lost", "<u8"), ("unmatched", "<u8")),
        *(("unknown", "<u8"), ("lost_comms", "<u8"), ("lost_names", "<u8")),
    ]
)
_NAME: Final = np.dtype([("state", "<u4"), ("text", "S28")])
_COMM: Final = np.dtype(
    [
        *(("id", "<u8"), ("opened_ns", "<u8"), ("closed_ns", "<u8"), ("rank", "<i4")),
        *(("ranks", "<i4"), ("nodes", "<i4"), ("interface", "<u4"), ("name", "S72")),
    ]
)
_RECORD: Final = np.dtype(
    [
        *(("stamp", "<u8"), ("start_ns", "<u8"), ("stop_ns", "<u8"), ("parent", "<u8")),
        *(("group", "<u8"), ("state_ns", "<u8", (3,)), ("value", "<u8"), ("sequence", "<u8")),
        *(("count", "<u8"), ("send_buffer", "<u8"), ("recv_buffer", "<u8"), ("stream", "<u8")),
        *(("user_tag", "<u8"), ("peer", "<i4"), ("steps", "<i4"), ("pid", "<i4")),
        *(("device", "<i4"), ("comm", "<u2"), ("kind", "u1"), ("channel", "u1"), ("func", "u1")),
        *(("datatype", "u1"), ("algo", "u1"), ("proto", "u1"), ("variant", "u1")),
        *(("warps", "u1"), ("flags", "u1"), ("spare", "V5")),
    ]
)
_IS_SEND, _GRAPH_CAPTURED, _IS_SYMMETRIC, _OTHER_PROCESS, _SYNC = 1, 2, 4, 8, 16

_WIDTHS: Final = {
    **dict.fromkeys(("ncclInt8", "ncclChar", "ncclUint8"), 1),
    **dict.fromkeys(("ncclFloat8e4m3", "ncclFloat8e5m2"), 1),
    **dict.fromkeys(("ncclFloat16", "ncclHalf", "ncclBfloat16"), 2),
    **dict.fromkeys(("ncclInt32", "ncclInt", "ncclUint32", "ncclFloat32", "ncclFloat"), 4),
    **dict.fromkeys(("ncclInt64", "ncclUint64", "ncclFloat64", "ncclDouble"), 8),
}
"""Name of an element type in NCCL -> its bytes (``ncclDatatypeToString``, ``nccl.h``)."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of a process.

    Attributes:
        id: Its identity, the same on all its ranks, as 16 hexadecimal digits; empty if unknown.
        name: What the job calls it; empty without a name.
        rank: The process's rank in it; None if unknown, as `size` and `nodes`.
        size: Its number of ranks.
        nodes: Its number of nodes.
        interface: Version of the profiler interface that NCCL used.
    """

    id: str
    name: str
    rank: int | None
    size: int | None
    nodes: int | None
    interface: int


@dataclass
class Ring:
    """What one process recorded.

    Attributes:
        path: The file.
        rank: Global rank; None if unknown.
        pid: The process.
        host: Its host.
        boot_id: Identifies the boot of the host, and so the clock; empty if unknown.
        opened_ns: When recording began, on the process's monotonic clock.
        opened_unix_ns: The same on the wall clock.
        communicators: Its communicators, by their place in the file.
        events: One row per event, columns as in `COLUMNS`, in the order of their begin.
        overwritten: Events that newer ones have replaced.
        notes: What is missing or damaged, one line each.
    """

    path: Location
    rank: int | None
    pid: int
    host: str
    boot_id: str
    opened_ns: int
    opened_unix_ns: int
    communicators: dict[int, Communicator]
    events: pa.Table
    overwritten: int = 0
    notes: list[str] = field(default_factory=list)


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is a ring."""
    return head.startswith(MAGIC)


def read_ring(path: Location) -> Ring:
    """Reads a ring.

    Raises:
        TraceError: It is not a ring, of another version, or so short that it holds no record.
    """
    try:
        with open_given(path) if isinstance(path, Path) else path.open("rb") as file:
            content = np.frombuffer(file.read(_MAX_BYTES), np.uint8)
            again = content
            if isinstance(path, Path):
                # Records that were written meanwhile have another stamp now.
                file.seek(0)
                again = np.frombuffer(file.read(len(content)), np.uint8)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    header = _header(path, content)
    at, capacity = int(header["records_at"]), int(header["capacity"])
    whole = min((len(content) - at) // _RECORD.itemsize, capacity)
    end = at + whole * _RECORD.itemsize
    records = content[at:end].view(_RECORD)
    changed = np.ones(whole, np.bool_)
    if len(again) == len(content):
        changed = records["stamp"] != again[at:end].view(_RECORD)["stamp"]
    notes = []
    if whole < capacity:
        notes.append(f"it is cut off: {whole} of {capacity} records are there")
    communicators = _communicators(content)
    names = _names(content)
    kept, damaged = _checked(records, header, changed, len(names))
    records = records[kept]
    records = records[np.argsort(records["stamp"])]
    claimed = int(header["claimed"])
    ring = Ring(
        path=path,
        rank=rank if 0 <= (rank := int(header["rank"])) <= _MAX_RANK else None,
        pid=max(int(header["pid"]), 0),
        host=_text(header["host"]),
        boot_id=_text(header["boot_id"]),
        opened_ns=int(header["opened_ns"]),
        opened_unix_ns=int(header["opened_unix_ns"]),
        communicators=communicators,
        events=_table(records, header, communicators, names),
        overwritten=max(0, claimed - capacity),
        notes=notes,
    )
    _add_losses(ring, header, damaged)
    return ring


def _header(path: Location, content: npt.NDArray[np.uint8]) -> Any:
    if len(content) < _HEADER.itemsize or not recognizes(content[: len(MAGIC)].tobytes()):
        raise TraceError(f"{path} is no ring of NCCL's events, or not yet one")
    header = content[: _HEADER.itemsize].view(_HEADER)[0]
    version = int(header["version"])
    if version != _VERSION or int(header["record_bytes"]) != _RECORD.itemsize:
        raise TraceError(
            f"{path} is a ring of version {version}; this ddltrace reads version {_VERSION}"
        )
    records_at = _NAMES_AT + _NUM_NAMES * _NAME.itemsize + _NUM_COMMS * _COMM.itemsize
    fits = 0 < int(header["capacity"]) <= _MAX_RECORDS
    fits = fits and max(int(header["opened_ns"]), int(header["opened_unix_ns"])) < 1 << 62
    if not fits or int(header["records_at"]) != records_at:
        raise TraceError(f"{path} is damaged: its header does not describe a ring")
    if len(content) < records_at:
        raise TraceError(f"{path} is cut off before its first record")
    return header


def _names(content: npt.NDArray[np.uint8]) -> list[str | None]:
    """The names by their numbers; number 0 stands for none."""
    table = content[_NAMES_AT : _NAMES_AT + _NUM_NAMES * _NAME.itemsize].view(_NAME)
    return [None, *(_text(row["text"]) if row["state"] == 2 else None for row in table[1:])]


def _communicators(content: npt.NDArray[np.uint8]) -> dict[int, Communicator]:
    at = _NAMES_AT + _NUM_NAMES * _NAME.itemsize
    table = content[at : at + _NUM_COMMS * _COMM.itemsize].view(_COMM)
    found = {}
    for place in np.flatnonzero(table["interface"]):
        row = table[place]
        rank, size, nodes = int(row["rank"]), int(row["ranks"]), int(row["nodes"])
        found[int(place)] = Communicator(
            id=f"{int(row['id']):016x}" if row["id"] else "",
            name=_text(row["name"]),
            rank=rank if 0 <= rank <= _MAX_RANK else None,
            size=size if 0 < size <= _MAX_RANK else None,
            nodes=nodes if 0 < nodes <= _MAX_RANK else None,
            interface=int(row["interface"]),
        )
    return found


def _text(value: bytes) -> str:
    """Text of the file without what cannot be shown."""
    text = bytes(value).split(b"\0")[0].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _checked(
    records: npt.NDArray[Any], header: Any, changed: npt.NDArray[np.bool_], num_names: int
) -> tuple[npt.NDArray[np.intp], int]:
    """The places of the records that are complete and valid, and how many are damaged."""
    stamps = records["stamp"]
    complete = (stamps != 0) & (stamps % 2 == 0) & ~changed
    numbers = stamps // 2
    places = np.arange(len(records), dtype=np.uint64)
    capacity = np.uint64(header["capacity"])
    valid = (numbers - np.uint64(1)) % capacity == places
    valid &= numbers <= np.uint64(header["claimed"])
    valid &= (records["start_ns"] < np.uint64(1 << 62)) & (records["kind"] < len(KINDS))
    valid &= records["comm"] < _NUM_COMMS
    valid &= num_names == _NUM_NAMES  # every number of one byte is in the table
    kept = np.flatnonzero(complete & valid)
    return kept, int(np.count_nonzero(complete & ~valid))


def _add_losses(ring: Ring, header: Any, damaged: int) -> None:
    """Notes what the plugin counted, and what of the file is damaged."""
    if damaged:
        ring.notes.append(
            f"{counted(damaged, 'record')} {agreeing(damaged, 'is')} damaged and left out"
        )
    if ring.overwritten:
        ring.notes.append(
            f"the oldest {counted(ring.overwritten, 'event')} of {int(header['claimed']):,} "
            f"{agreeing(ring.overwritten, 'was')} overwritten: the ring keeps "
            f"{int(header['capacity'])} (DDLTRACE_NCCL_RECORDS)"
        )
    for key, what in (
        ("lost", "event was lost: another thread was writing its record"),
        ("unknown", "event has a kind that this version does not know"),
        ("lost_comms", "communicator is beyond those that a ring can describe"),
        ("lost_names", "name is beyond those that a ring can hold"),
    ):
        if number := int(header[key]):
            noun, _, rest = what.partition(" ")
            verb, _, rest = rest.partition(" ")
            ring.notes.append(f"{counted(number, noun)} {agreeing(number, verb)} {rest}")


# --- the table -----------------------------------------------------------------------------------

COLUMNS: Final = pa.schema(
    [
        *(("rank", pa.int32()), ("pid", pa.int64()), ("event", pa.int64()), ("kind", pa.string())),
        *(("parent", pa.int64()), ("parent_pid", pa.int64()), ("group_event", pa.int64())),
        *(("comm", pa.string()), ("comm_name", pa.string()), ("comm_rank", pa.int32())),
        ("comm_size", pa.int32()),
        *(("start_ns", pa.int64()), ("end_ns", pa.int64()), ("func", pa.string())),
        *(("seq", pa.int64()), ("datatype", pa.string()), ("count", pa.int64())),
        *(("bytes", pa.int64()), ("algo", pa.string()), ("proto", pa.string())),
        *(("channels", pa.int32()), ("channel", pa.int32()), ("warps", pa.int32())),
        *(("root", pa.int32()), ("peer", pa.int32()), ("is_send", pa.bool_())),
        *(("steps", pa.int32()), ("step_number", pa.int32()), ("chunk_bytes", pa.int64())),
        *(("gpu_start_ns", pa.int64()), ("gpu_end_ns", pa.int64())),
        *(("gpu_wait_ns", pa.int64()), ("peer_wait_ns", pa.int64()), ("net_wait_ns", pa.int64())),
        *(("device", pa.int32()), ("graph_captured", pa.bool_()), ("is_symmetric", pa.bool_())),
        *(("variant", pa.string()), ("user_tag", pa.int64()), ("send_buffer", pa.int64())),
        *(("recv_buffer", pa.int64()), ("stream", pa.int64())),
    ]
)
"""Columns of the events of a ring. `docs/nccl.md` describes them."""


def _table(
    records: npt.NDArray[Any],
    header: Any,
    communicators: dict[int, Communicator],
    names: list[str | None],
) -> pa.Table:
    kind = records["kind"].astype(np.int64)
    is_of = {name: kind == place for place, name in enumerate(KINDS)}
    message = is_of["coll"] | is_of["p2p"] | is_of["ce_coll"]
    api = is_of["coll_api"] | is_of["p2p_api"]
    kernel = is_of["kernel_ch"] | is_of["kernel_phase"]
    step, op, net = is_of["proxy_step"], is_of["proxy_op"], is_of["net_plugin"]
    flags = records["flags"]
    foreign = op & ((flags & _OTHER_PROCESS) != 0)
    datatype = _named(records["datatype"], names)
    elements = message | api
    place = _places(records, (step, net))
    rank, pid = int(header["rank"]), int(header["pid"])
    columns: dict[str, pa.Array] = {
        "rank": pa.array(np.full(len(records), rank), mask=np.full(len(records), rank < 0)),
        "pid": pa.array(np.full(len(records), pid)),
        "event": _ints(records["stamp"] // 2),
        "kind": _coded(kind, list(KINDS)),
        "parent": _ints(records["parent"], records["parent"] != 0),
        "parent_pid": _ints(records["pid"], foreign),
        "group_event": _ints(records["group"], records["group"] != 0),
        "comm": _of_comms(place, {p: each.id or None for p, each in communicators.items()}),
        "comm_name": _of_comms(place, {p: each.name or None for p, each in communicators.items()}),
        "comm_rank": _of_comms(place, {p: each.rank for p, each in communicators.items()}),
        "comm_size": _of_comms(place, {p: each.size for p, each in communicators.items()}),
        "start_ns": _ints(records["start_ns"]),
        "end_ns": _later(records["stop_ns"], records["start_ns"]),
        "func": _named(records["func"], names),
        "seq": _ints(records["sequence"], is_of["coll"] | is_of["ce_coll"]),
        "datatype": datatype,
        "count": _ints(records["count"], elements),
        "bytes": _bytes(records, datatype, elements, step | op, net | is_of["ce_batch"]),
        "algo": _named(records["algo"], names),
        "proto": _named(records["proto"], names),
        "channels": _small(records["channel"], (is_of["coll"] | is_of["p2p"])),
        "channel": _small(records["channel"], op | kernel),
        "warps": _small(records["warps"], is_of["coll"]),
        "root": _small(records["peer"], is_of["coll"] | is_of["coll_api"] | is_of["ce_coll"]),
        "peer": _small(records["peer"], is_of["p2p"] | op),
        "is_send": pa.array((flags & _IS_SEND) != 0, mask=~op),
        "steps": _small(records["steps"], op),
        "step_number": _small(records["steps"], step | is_of["kernel_phase"]),
        "chunk_bytes": _ints(records["count"], op),
        "gpu_start_ns": _ints(records["sequence"], kernel & (records["sequence"] != 0)),
        "gpu_end_ns": _later(records["value"], records["sequence"], kernel),
        "gpu_wait_ns": _later(records["state_ns"][:, 0], records["start_ns"], step),
        "peer_wait_ns": _later(records["state_ns"][:, 1], records["start_ns"], step),
        "net_wait_ns": _later(records["state_ns"][:, 2], records["start_ns"], step),
        "device": _small(records["device"], net & (records["device"] >= 0)),
        "graph_captured": pa.array(
            (flags & _GRAPH_CAPTURED) != 0, mask=~(api | is_of["group_api"])
        ),
        "is_symmetric": pa.array((flags & _IS_SYMMETRIC) != 0, mask=~is_of["coll"]),
        "variant": _named(records["variant"], names),
        "user_tag": _ints(records["user_tag"], records["user_tag"] != 0),
        "send_buffer": _ints(records["send_buffer"], records["send_buffer"] != 0),
        "recv_buffer": _ints(records["recv_buffer"], records["recv_buffer"] != 0),
        "stream": _ints(records["stream"], records["stream"] != 0),
    }
    return pa.table(columns).cast(COLUMNS)


def _places(
    records: npt.NDArray[Any], inner: tuple[npt.NDArray[np.bool_], ...]
) -> npt.NDArray[np.uint16]:
    """The place of each event's communicator.

    What belongs to a proxy operation has that of the operation: NCCL calls the plugin with the
    context of the process that launched the operation, which is of no meaning in another process.

    Args:
        records: The records, sorted by number.
        inner: Which events take the communicator of their parents, the outer ones first.
    """
    places: npt.NDArray[np.uint16] = records["comm"].copy()
    numbers = records["stamp"] // 2
    if not len(records):
        return places
    parent = np.searchsorted(numbers, records["parent"])
    parent = np.minimum(parent, len(records) - 1)
    found = numbers[parent] == records["parent"]
    for which in inner:
        places[which] = np.where(found, places[parent], 0)[which]
    return places


def _ints(values: npt.NDArray[Any], known: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Integers that fit into 63 bits; others are null."""
    wide = values.astype(np.uint64)
    fits = wide < _PENDING
    known = fits if known is None else known & fits
    return pa.array(wide.astype(np.int64), mask=~known)


def _small(values: npt.NDArray[Any], known: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=~known)


def _later(
    values: npt.NDArray[Any],
    than: npt.NDArray[Any],
    known: npt.NDArray[np.bool_] | None = None,
) -> pa.Array:
    """Times that were set, and are not before others; null elsewhere."""
    sane = (values >= than) & (values < np.uint64(1 << 62))
    return _ints(values, sane if known is None else sane & known)


def _bytes(
    records: npt.NDArray[Any],
    datatype: pa.Array,
    elements: npt.NDArray[np.bool_],
    carried: npt.NDArray[np.bool_],
    counted_bytes: npt.NDArray[np.bool_],
) -> pa.Array:
    """Bytes of messages by their element type, of steps as NCCL reported them."""
    indices = datatype.indices.fill_null(len(datatype.dictionary)).to_numpy()
    widths = [_WIDTHS.get(name, 0) for name in datatype.dictionary.to_pylist()]
    width = np.array([*widths, 0], np.uint64)[indices]
    count = records["count"]
    fits = count < np.uint64(1 << 58)
    values = np.where(elements, np.where(fits, count, 0) * width, count)
    values = np.where(carried, records["value"], values)
    known = (elements & (width != 0) & fits) | counted_bytes
    known |= carried & (records["value"] < _PENDING)
    return _ints(values, known)


def _named(places: npt.NDArray[np.uint8], names: list[str | None]) -> pa.DictionaryArray:
    """Names by their numbers; null where there is none."""
    known = [place for place, name in enumerate(names) if name is not None]
    code = np.full(_NUM_NAMES, -1, np.int32)
    code[known] = np.arange(len(known))
    indices = code[places]
    texts = pa.array([names[place] for place in known], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), texts)


def _coded(codes: npt.NDArray[np.int64], values: list[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values))


def _of_comms(places: npt.NDArray[np.uint16], values: dict[int, Any]) -> pa.Array:
    """A value of each event's communicator."""
    table = pa.array([values.get(place) for place in range(_NUM_COMMS)])
    if pa.types.is_null(table.type):
        return pa.nulls(len(places))
    return table.take(pa.array(places.astype(np.int32)))
