"""Chrome's trace format: opens in Perfetto's viewer, in chrome://tracing and many others.

The format is described in
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

A rank is a process, a lane a thread. Complete events of a thread must nest; lanes in which they do
not get further threads. Lines are put together by Arrow, a column at a time. Events of ranks with a
device carry the fields of Kineto's files too, so that tools for those (Holistic Trace Analysis) can
read them. These tools want one file for each rank, with the rank at its head. They recognize device
work by ``args.stream`` and ``args.correlation``, kernels and copies by ``cat``, and steps by user
annotations named ``ProfilerStep#N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.counter_series import counter_series
from ddltrace.analyzer.events.event_columns import KIND, NULL, BoolArray, Columns, IntArray, named
from ddltrace.analyzer.events.launches import (
    is_python_call,
    is_runtime_call,
    launches_of,
)
from ddltrace.analyzer.exporters.output import open_for_writing
from ddltrace.analyzer.exporters.tracks import (
    BATCH,
    FlowFinder,
    Flows,
    Integers,
    details_of,
    ends_of,
    tracks_of,
)
from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.joined.nccl_events import with_nccl

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

FIRST_CORRELATION: Final = 1 << 16
"""HTA stores row numbers in the type of the correlation numbers; 8 or 16 bits are too few."""

_STREAM: Final = re.compile(r"(?:sync/)?stream-(\d{1,18})(?:@(\d{1,9}))?$")
_CATEGORIES: Final = (
    "",  # keeps the category of every other trace: the event's kind
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_sync",
    "cuda_runtime",
    "cpu_op",
    "python_function",
    "user_annotation",
    "gpu_user_annotation",
)
_CODE: Final = {name: code for code, name in enumerate(_CATEGORIES)}


class KinetoFields:
    """What the events of a rank with a device are in Kineto's terms.

    Args:
        columns: All events of the rank.
        first_correlation: The number that the first pair of launch and device work gets.

    Attributes:
        next_correlation: The first number that is not used.
    """

    def __init__(self, columns: Columns, first_correlation: int) -> None:
        self._stream, self._device = _streams(columns)
        self._bandwidth = _copy_bandwidth(columns)
        self._category = _categories(columns, self._stream)
        work = np.flatnonzero(self._stream != NULL)
        call = launches_of(columns)[work]
        # Works of one call share its number; a work without a call has one of its own.
        key = np.where(call != NULL, call, len(columns) + work)
        _, number = np.unique(key, return_inverse=True)
        self._correlation = np.full(len(columns), NULL, dtype=np.int64)
        self._correlation[work] = first_correlation + number
        self._correlation[call[call != NULL]] = first_correlation + number[call != NULL]
        self.next_correlation = first_correlation + int(number.max(initial=-1)) + 1

    def categories(self, rows: IntArray, kinds: pa.Array) -> pa.Array:
        """The ``cat`` of some events; those without one of their own keep their kind."""
        codes = self._category[rows]
        own = pa.array(_CATEGORIES, pa.string()).take(pa.array(codes))
        chosen = pc.if_else(pa.array(codes == 0), kinds.cast(pa.string()), own)
        return chosen.dictionary_encode()

    def arguments(self, rows: IntArray) -> dict[str, pa.Array]:
        """Additional ``args`` of some events; null where an event has none."""
        found = {}
        for name, column in (
            ("device", self._device),
            ("stream", self._stream),
            ("correlation", self._correlation),
        ):
            values = column[rows]
            if (values != NULL).any():
                found[name] = pa.array(values, mask=values == NULL)
        bandwidth = self._bandwidth[rows]
        if not np.isnan(bandwidth).all():
            found["memory bandwidth (GB/s)"] = pa.array(bandwidth, mask=np.isnan(bandwidth))
        return found


def has_device_work(columns: Columns) -> bool:
    """Whether any event is a kernel or a copy on a stream."""
    return bool(np.isin(columns.kind, [KIND["kernel"], KIND["copy"]]).any())


def _streams(columns: Columns) -> tuple[IntArray, IntArray]:
    matches = [_STREAM.match(lane) for lane in columns.lanes]
    streams = [NULL if match is None else int(match[1]) for match in matches]
    devices = [NULL if match is None else int(match[2] or 0) for match in matches]
    return (
        np.array([*streams, NULL], dtype=np.int64)[columns.lane],
        np.array([*devices, NULL], dtype=np.int64)[columns.lane],
    )


def _copy_bandwidth(columns: Columns) -> npt.NDArray[np.float64]:
    """Bytes per nanosecond, which is GB/s, of each copy; NaN for all other events."""
    rows = columns.rows("copy")
    size, start, end = columns.ints("bytes")[rows], columns.start[rows], columns.end[rows]
    known = (size >= 0) & (end > start)
    bandwidth = np.full(len(columns), np.nan)
    bandwidth[rows[known]] = size[known] / (end - start)[known]
    return bandwidth


def _categories(columns: Columns, stream: IntArray) -> IntArray:
    kind = columns.kind
    on_stream = stream != NULL
    host = kind == KIND["host"]
    annotation = np.isin(kind, [KIND[name] for name in ("step", "phase", "data", "marker")])
    device_annotation = np.array([*(x.startswith("annotation/") for x in columns.lanes), False])
    rules: tuple[tuple[BoolArray, str], ...] = (
        (on_stream & np.isin(kind, [KIND["kernel"], KIND["message"]]), "kernel"),
        (on_stream & (kind == KIND["copy"]), "gpu_memcpy"),
        (on_stream & (kind == KIND["copy"]) & named(columns, _is_fill), "gpu_memset"),
        (host, "cpu_op"),
        (host & named(columns, is_python_call), "python_function"),
        (host & named(columns, is_runtime_call), "cuda_runtime"),
        (host & on_stream, "cuda_sync"),
        (annotation, "user_annotation"),
        (annotation & device_annotation[columns.lane], "gpu_user_annotation"),
    )
    codes = np.zeros(len(columns), dtype=np.int8)
    for rows, name in rules:
        codes[rows] = _CODE[name]
    return codes


def _is_fill(name: str) -> bool:
    return name.startswith("Memset")


_encode: Final = msgspec.json.Encoder().encode


def write(trace: Trace, path: Path) -> int:
    """Writes all ranks into one file; returns the number of events written."""
    return _write_ranks(trace, trace.ranks, path, FlowFinder(trace))


def write_each_rank(trace: Trace, folder: Path) -> int:
    """Writes ``rank-N.json.gz`` for each rank into a folder; returns the number of events."""
    finder = FlowFinder(trace)
    return sum(
        _write_ranks(trace, [rank], folder / f"rank-{rank}.json.gz", finder) for rank in trace.ranks
    )


def _write_ranks(trace: Trace, ranks: Sequence[int], path: Path, finder: FlowFinder) -> int:
    written, correlation = 0, FIRST_CORRELATION
    with open_for_writing(path) as file:
        head = {"source": "ddltrace", "trace": trace.name, "origin_ns": trace.origin_ns}
        file.write(b'{"displayTimeUnit":"ns","otherData":' + _encode(head) + b",\n")
        if len(ranks) == 1:
            # On a line of its own and with a space: HTA looks for the rank line by line.
            world_size = max(info.world_size for info in trace.run.ranks)
            file.write(
                f'"distributedInfo": {{"rank": {ranks[0]}, "world_size": {world_size}}},\n'.encode()
            )
        file.write(b'"traceEvents":[\n')
        separator = b""
        for rank in ranks:
            table = with_nccl(trace, rank)
            columns = Columns(table)
            kineto = None
            # Rows of damaged times are not in the columns, which then fit the table no more.
            if len(columns) == table.num_rows and has_device_work(columns):
                kineto = KinetoFields(columns, correlation)
                correlation = kineto.next_correlation
            flows = finder.of_rank(table, rank)
            for lines in _text_of_rank(trace, rank, table, flows, kineto):
                file.write(separator + lines)
                separator = b",\n"
            written += table.num_rows
        file.write(b"\n]}\n")
    return written


def _text_of_rank(
    trace: Trace, rank: int, table: pa.Table, flows: Flows, kineto: KinetoFields | None
) -> Iterator[bytes]:
    yield _metadata("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    ends = ends_of(table)
    for number, track in enumerate(tracks_of(table, ends), 1):
        yield _metadata("thread_name", rank, number, {"name": track.name})
        yield _metadata("thread_sort_index", rank, number, {"sort_index": number})
        place = f'"pid":{rank},"tid":{number}'
        for first in range(0, len(track.rows), BATCH):
            rows = track.rows[first : first + BATCH]
            part = table.take(pa.array(rows))
            starts = part["start_ns"].to_numpy() - trace.origin_ns
            lengths = ends[rows] - part["start_ns"].to_numpy()
            details = details_of(part, trace.tensors(rank))
            if "shapes" in details:
                details["Input Dims"] = _as_json(details.pop("shapes"))
            kinds = _quoted(part["kind"].combine_chunks())
            categories = kinds
            if kineto is not None:
                categories = _quoted(kineto.categories(rows, part["kind"].combine_chunks()))
                details |= kineto.arguments(rows)
                differs = pc.not_equal(categories, kinds)
                details["kind"] = pc.if_else(differs, part["kind"].combine_chunks(), None)
            yield _text_of_events(
                part, categories, details, place=place, starts=starts, lengths=lengths
            )
            if arrows := _arrows(rows, starts, lengths, place, flows):
                yield b",\n".join(arrows)
    if counters := _counter_events(trace, rank):
        yield b",\n".join(counters)


def _counter_events(trace: Trace, rank: int) -> list[bytes]:
    """The resource counters of a rank: an event for each value, in the counter's unit."""
    lines = []
    for series in counter_series(trace.counters(rank)):
        name = printable(series.label)
        since = series.time_ns - trace.origin_ns
        # Values from before the first event, and those that JSON has no number for, are left out.
        kept = np.flatnonzero((since >= 0) & np.isfinite(series.value))
        lines += [
            _encode(
                {
                    "ph": "C",
                    "name": name,
                    "pid": rank,
                    "ts": float(since[i]) / 1e3,
                    "args": {series.unit: float(series.value[i])},
                }
            )
            for i in kept
        ]
    return lines


def _text_of_events(
    part: pa.Table,
    categories: pa.Array,
    details: dict[str, pa.Array],
    *,
    place: str,
    starts: Integers,
    lengths: Integers,
) -> bytes:
    """One line of JSON per event, joined."""
    kinds = _quoted(part["kind"].combine_chunks())
    names = pc.coalesce(_quoted(part["name"].combine_chunks()), kinds)
    args = [
        pc.fill_null(_joined(f',"{name}":', _json(column)), "") for name, column in details.items()
    ]
    # Every argument brings its comma; the first one's is cut off.
    arguments = pc.utf8_slice_codeunits(_joined("", *args), 1) if args else pa.scalar("")
    lines = _joined(
        '{"ph":"X","cat":',
        categories,
        ',"name":',
        names,
        ',"ts":',
        _microseconds(starts),
        ',"dur":',
        _microseconds(lengths),
        f',{place},"args":{{',
        arguments,
        "}}",
    )
    text: bytes = (
        pc.binary_join(pa.LargeListArray.from_arrays([0, len(lines)], lines), ",\n")[0]
        .as_py()
        .encode()
    )
    return text


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(
        *(pa.scalar(part, pa.string()) if isinstance(part, str) else part for part in parts), ""
    )


def _json(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return _quoted(column)
    return column.cast(pa.string())


def _as_json(column: pa.DictionaryArray) -> pa.Array:
    """Text that is JSON itself; null where it is not, because it was cut short."""
    return pa.array([_checked(text) for text in column.dictionary.to_pylist()], pa.string()).take(
        column.indices
    )


def _checked(text: str) -> str | None:
    try:
        return _encode(msgspec.json.decode(text)).decode()
    except msgspec.DecodeError:
        return None


def _quoted(column: pa.DictionaryArray) -> pa.Array:
    """Text as JSON: each distinct one is quoted once."""
    quoted = [_encode(text).decode() for text in column.dictionary.to_pylist()]
    return pa.array(quoted, pa.string()).take(column.indices)


def _microseconds(nanoseconds: Integers) -> pa.Array:
    """Exact decimal microseconds."""
    whole, rest = np.divmod(np.abs(nanoseconds), 1000)
    sign = pc.if_else(pa.array(nanoseconds < 0), "-", "")
    digits = pc.utf8_lpad(pa.array(rest).cast(pa.string()), 3, "0")
    return _joined(sign, pa.array(whole).cast(pa.string()), ".", digits)


def _arrows(
    rows: Integers, starts: Integers, lengths: Integers, place: str, flows: Flows
) -> list[bytes]:
    """Arrows bind to the interval around their time: their ends lie inside it."""
    lines = []
    for index in np.flatnonzero(np.isin(rows, [*flows.begins, *flows.ends])).tolist():
        row, start = int(rows[index]), int(starts[index])
        inside = start + max(0, int(lengths[index]) - 1)
        arrows = [("s", start, number) for number in flows.begins.get(row, ())]
        arrows += [("f", inside, number) for number in flows.ends.get(row, ())]
        for phase, time, number in arrows:
            when = f"{time / 1000:.3f}"
            lines.append(
                f'{{"ph":"{phase}","bp":"e","cat":"flow","name":"flow","id":{number},'
                f'"ts":{when},{place}}}'.encode()
            )
    return lines


def _metadata(name: str, rank: int, track: int, args: dict[str, Any]) -> bytes:
    return _encode({"ph": "M", "name": name, "pid": rank, "tid": track, "args": args})
