"""Perfetto's own format: a stream of protobuf packets (https://perfetto.dev/docs/reference/).

A rank is a process track, each of its lanes a track below; arrows are flows. Names and
categories are interned, so an event takes a few dozen bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa

from ddltrace.analyzer.events.counter_series import counter_series
from ddltrace.analyzer.exporters.output import open_for_writing
from ddltrace.analyzer.exporters.tracks import (
    BATCH,
    FlowFinder,
    Flows,
    Integers,
    Track,
    details_of,
    ends_of,
    tracks_of,
)
from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.joined.nccl_events import with_nccl
from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_PROTOS: Final = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"
_SEQUENCE: Final = 1
_AFTER_LANES: Final = 1 << 20
_MAX_PIECES: Final = 1 << 18
# Field number and wire type, as protobuf writes them before a value.
_PACKET_TAG: Final = b"\x0a"  # Trace.packet: 1, length-delimited
_TIMESTAMP_TAG: Final = b"\x40"  # TracePacket.timestamp: 8, varint
_EVENT_TAG: Final = b"\x5a"  # TracePacket.track_event: 11, length-delimited


def write(trace: Trace, path: Path) -> int:
    """Writes a trace; returns the number of events written.

    Raises:
        MissingCapabilityError: The package ``perfetto`` is not installed.
    """
    require_extra("perfetto", "export --to perfetto")
    with open_for_writing(path) as file:
        return _Writer(file, trace).write()


class _Writer:
    def __init__(self, file: IO[bytes], trace: Trace) -> None:
        protos: Any = importlib.import_module(_PROTOS)
        self._protos = protos
        self._file = file
        self._trace = trace
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._annotations: dict[str, int] = {}
        self._tracks = 0
        self._started = False
        self._pieces: dict[tuple[Any, ...], bytes] = {}
        self._prefix: bytes = protos.TracePacket(
            trusted_packet_sequence_id=_SEQUENCE,
            sequence_flags=protos.TracePacket.SequenceFlags.SEQ_NEEDS_INCREMENTAL_STATE,
        ).SerializeToString()

    def write(self) -> int:
        finder = FlowFinder(self._trace)
        written = 0
        for rank in self._trace.ranks:
            table = with_nccl(self._trace, rank)
            process = self._process(rank)
            ends = ends_of(table)
            flows = finder.of_rank(table, rank)
            for order, track in enumerate(tracks_of(table, ends)):
                uuid = self._track(process, track.name, order)
                self._events(rank, uuid, track, table=table, ends=ends, flows=flows)
            self._counters(process, rank)
            written += table.num_rows
        return written

    def _process(self, rank: int) -> int:
        packet = self._new_packet()
        packet.track_descriptor.uuid = self._next_track()
        packet.track_descriptor.process.pid = rank + 1  # 0 is not a process to Perfetto
        packet.track_descriptor.process.process_name = f"rank {rank}"
        packet.track_descriptor.child_ordering = (
            self._protos.TrackDescriptor.ChildTracksOrdering.EXPLICIT
        )
        self._put(packet)
        return self._tracks

    def _track(self, parent: int, name: str, order: int) -> int:
        packet = self._new_packet()
        packet.track_descriptor.uuid = self._next_track()
        packet.track_descriptor.parent_uuid = parent
        packet.track_descriptor.name = name
        packet.track_descriptor.sibling_order_rank = order
        self._put(packet)
        return self._tracks

    def _counters(self, process: int, rank: int) -> None:
        """Writes each resource counter of a rank as a counter track below its process."""
        origin = self._trace.origin_ns
        for series in counter_series(self._trace.counters(rank)):
            packet = self._new_packet()
            packet.track_descriptor.uuid = uuid = self._next_track()
            packet.track_descriptor.parent_uuid = process
            packet.track_descriptor.name = printable(series.label)
            packet.track_descriptor.sibling_order_rank = _AFTER_LANES
            packet.track_descriptor.counter.unit_name = series.unit
            self._put(packet)
            # Perfetto's times are unsigned: samples before the first event are left out.
            since = series.time_ns - origin
            for time, value in zip(since.tolist(), series.value.tolist(), strict=True):
                if time >= 0:
                    event = self._protos.TrackEvent(
                        type=self._protos.TrackEvent.Type.TYPE_COUNTER,
                        track_uuid=uuid,
                        double_counter_value=value,
                    )
                    self._put_event(time, event.SerializeToString())

    def _next_track(self) -> int:
        self._tracks += 1
        return self._tracks

    def _events(
        self,
        rank: int,
        uuid: int,
        track: Track,
        *,
        table: pa.Table,
        ends: Integers,
        flows: Flows,
    ) -> None:
        """Writes the begin and end of each event in the order in which they nest.

        A flow leaves a slice at its begin and arrives at the end of another one. Perfetto drops
        a flow that arrives before it left, and most receives begin before their send.
        """
        end_event = self._end_event(uuid)
        open_slices: list[tuple[int, bytes]] = []
        for row, start, end, kind, name, details in self._rows(rank, track, table, ends):
            while open_slices and open_slices[-1][0] <= start:
                self._put_event(*open_slices.pop())
            event = self._begin_event(uuid, kind, name)
            for key, value in details:
                event += self._annotation(key, value)
            if row in flows.begins:
                event += self._encoded_flows(flow_ids=flows.begins[row])
            self._put_event(start, event)
            arriving = flows.ends.get(row)
            closing = self._encoded_flows(terminating_flow_ids=arriving) if arriving else b""
            open_slices.append((end, end_event + closing))
        while open_slices:
            self._put_event(*open_slices.pop())

    def _rows(
        self, rank: int, track: Track, table: pa.Table, ends: Integers
    ) -> Iterator[tuple[int, int, int, str, str, list[tuple[str, Any]]]]:
        tensors = self._trace.tensors(rank)
        origin = self._trace.origin_ns
        for first in range(0, len(track.rows), BATCH):
            rows = track.rows[first : first + BATCH]
            part = table.take(pa.array(rows))
            starts = (part["start_ns"].to_numpy() - origin).tolist()
            stops = (ends[rows] - origin).tolist()
            kinds, names = part["kind"].to_pylist(), part["name"].to_pylist()
            shown = details_of(part, tensors)
            details = zip(*(column.to_pylist() for column in shown.values()), strict=True)
            for row, start, end, kind, name, values in zip(
                rows.tolist(),
                starts,
                stops,
                kinds,
                names,
                details if shown else [()] * len(rows),
                strict=True,
            ):
                pairs = [pair for pair in zip(shown, values, strict=True) if pair[1] is not None]
                yield row, start, end, kind, name or kind, pairs

    # An event is put together from encoded pieces: in protobuf, messages that are written one
    # behind the other are one message, and nearly all pieces come up again and again.

    def _begin_event(self, uuid: int, kind: str, name: str) -> bytes:
        key = (uuid, kind, name)
        piece = self._pieces.get(key)
        if piece is None:
            event = self._protos.TrackEvent(
                type=self._protos.TrackEvent.Type.TYPE_SLICE_BEGIN, track_uuid=uuid
            )
            event.name_iid = self._interned(self._names, name, "event_names")
            event.category_iids.append(self._interned(self._categories, kind, "event_categories"))
            piece = self._keep(key, event.SerializeToString())
        return piece

    def _end_event(self, uuid: int) -> bytes:
        encoded: bytes = self._protos.TrackEvent(
            type=self._protos.TrackEvent.Type.TYPE_SLICE_END, track_uuid=uuid
        ).SerializeToString()
        return encoded

    def _annotation(self, key: str, value: Any) -> bytes:
        piece = self._pieces.get((key, value))
        if piece is None:
            event = self._protos.TrackEvent()
            annotation = event.debug_annotations.add()
            annotation.name_iid = self._interned(self._annotations, key, "debug_annotation_names")
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = value
            piece = self._keep((key, value), event.SerializeToString())
        return piece

    def _encoded_flows(self, **flows: Sequence[int]) -> bytes:
        encoded: bytes = self._protos.TrackEvent(**flows).SerializeToString()
        return encoded

    def _keep(self, key: tuple[Any, ...], piece: bytes) -> bytes:
        if len(self._pieces) >= _MAX_PIECES:
            self._pieces.clear()
        self._pieces[key] = piece
        return piece

    def _interned(self, known: dict[str, int], text: str, table: str) -> int:
        """The number that stands for a text; a new one is announced in a packet of its own."""
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            packet = self._new_packet()
            getattr(packet.interned_data, table).add(iid=number, name=text)
            self._put(packet)
        return number

    def _put_event(self, time: int, event: bytes) -> None:
        body = b"".join(
            (self._prefix, _TIMESTAMP_TAG, _varint(time), _EVENT_TAG, _varint(len(event)), event)
        )
        self._file.write(b"".join((_PACKET_TAG, _varint(len(body)), body)))

    def _put(self, packet: Any) -> None:
        body = packet.SerializeToString()
        self._file.write(_PACKET_TAG + _varint(len(body)) + body)

    def _new_packet(self) -> Any:
        flags = self._protos.TracePacket.SequenceFlags
        packet = self._protos.TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        if self._started:
            packet.sequence_flags = flags.SEQ_NEEDS_INCREMENTAL_STATE
        else:
            packet.sequence_flags = flags.SEQ_INCREMENTAL_STATE_CLEARED
            self._started = True
        return packet


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
