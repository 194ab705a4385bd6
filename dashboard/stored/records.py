"""Encodes records with arrays as a JSON document, and decodes them.

A record is written as ``["record", name of its class, value of each field]``. Reading constructs
only the classes that `RECORDS` lists: nothing in a file names code to run.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer import model
from ddltrace.analyzer.joined.join import AllMessages, Collectives
from ddltrace.analyzer.slack import SlackRow
from ddltrace.dashboard.stored.cache import ArrayReader, ArrayWriter
from ddltrace.dashboard.timeline.event_index import EventIndex
from ddltrace.dashboard.timeline.lod import RowIndex
from ddltrace.dashboard.timeline.tracks import Row, Timeline, Track

_MODULES: Final = {
    sys.modules[item.__module__]
    for item in vars(model).values()
    if isinstance(item, type) and dataclasses.is_dataclass(item)
}
"""The modules of an analysis's records."""

RECORDS: Final[dict[str, type]] = {
    record.__name__: record
    for record in (
        *(
            item
            for each in _MODULES
            for item in vars(each).values()
            if dataclasses.is_dataclass(item)
        ),
        *(AllMessages, Collectives, SlackRow),
        *(EventIndex, Row, Timeline, Track),
    )
    if isinstance(record, type)
}


class Encoder:
    """Encodes values; arrays go to a file at once, so they need not stay in memory.

    Args:
        writer: Receives the arrays.
    """

    def __init__(self, writer: ArrayWriter) -> None:
        self._writer = writer
        self._lists: dict[int, tuple[int, list[Any]]] = {}

    def encode(self, value: Any) -> Any:  # noqa: PLR0911 (one return for each type)
        """The JSON of a value; a list that several records share is written once.

        Raises:
            TypeError: The value is of a type that is not stored.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return self._writer.add(value)
        if isinstance(value, tuple):
            return ["tuple", *map(self.encode, value)]
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, set):
            return ["set", *map(self.encode, sorted(value))]
        if isinstance(value, dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, RowIndex):
            return ["row", *map(self._writer.add, value.arrays())]
        if isinstance(value, pa.Table):
            return ["table", self._table(value)]
        if isinstance(value, pa.Array):
            return ["column", self._table(pa.table({"column": value}))]
        name = type(value).__name__
        if RECORDS.get(name) is type(value) and dataclasses.is_dataclass(value):
            fields = [getattr(value, f.name) for f in dataclasses.fields(value) if f.init]
            return ["record", name, *map(self.encode, fields)]
        raise TypeError(f"values of {type(value)} are not stored")

    def _list(self, value: list[Any]) -> Any:
        if id(value) in self._lists:
            return ["same", self._lists[id(value)][0]]
        # The list is kept so that no other one gets its id.
        self._lists[id(value)] = len(self._lists), value
        return ["list", self._lists[id(value)][0], *map(self.encode, value)]

    def _table(self, table: pa.Table) -> list[Any]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return self._writer.add(np.frombuffer(sink.getvalue(), np.uint8))


class Decoder:
    """Decodes documents of `Encoder`.

    Args:
        reader: Provides the arrays.
    """

    def __init__(self, reader: ArrayReader) -> None:
        self._reader = reader
        self._lists: dict[int, list[Any]] = {}

    def decode(self, value: Any) -> Any:  # noqa: PLR0911 (one return for each type)
        """The value of some JSON."""
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "array":
            return self._reader.array(value)
        if kind == "tuple":
            return tuple(map(self.decode, rest))
        if kind == "list":
            number, *items = rest
            self._lists[number] = list(map(self.decode, items))
            return self._lists[number]
        if kind == "same":
            return self._lists[rest[0]]
        if kind == "set":
            return set(map(self.decode, rest))
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in rest}
        if kind == "range":
            return range(*rest)
        if kind == "row":
            return RowIndex.of_arrays(*map(self._reader.array, rest))
        if kind in ("table", "column"):
            data = pa.py_buffer(self._reader.array(rest[0]))
            table = pa.ipc.open_stream(data).read_all()
            if kind == "table":
                return table
            column = table["column"]
            return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        name, *fields = rest
        return RECORDS[name](*map(self.decode, fields))
