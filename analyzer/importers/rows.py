"""Collects events one by one, for formats with small files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pyarrow as pa

from ddltrace.analyzer.importers.imported_columns import (
    coded_list,
    events_table,
    id_lists,
    optional_integers,
)
from ddltrace.tracer.trace.schema import EVENTS


@dataclass(slots=True)
class Row:
    """One event; the columns of `EVENTS`."""

    start_ns: int
    end_ns: int | None
    kind: str
    name: str | None = None
    lane: str | None = None
    step: int | None = None
    phase: str | None = None
    id: int | None = None
    parent: int | None = None
    op: str | None = None
    group: str | None = None
    seq: int | None = None
    peer: int | None = None
    tag: int | None = None
    bytes: int | None = None
    out_bytes: int | None = None
    wire_bytes: int | None = None
    dtype: str | None = None
    enqueue_ns: int | None = None
    status: str | None = None
    clock: str | None = None
    buffer: int | None = None
    shapes: str | None = None
    samples: int | None = None
    tokens: int | None = None
    flops: int | None = None
    tensors: Sequence[int] | None = None


def table_of(rows: Sequence[Row]) -> pa.Table:
    """The rows as a table of schema `EVENTS`."""
    columns = {}
    for entry in fields(Row):
        values = [getattr(row, entry.name) for row in rows]
        kind = EVENTS.field(entry.name).type
        if entry.name == "tensors":
            columns[entry.name] = id_lists(values)
        elif pa.types.is_dictionary(kind):
            columns[entry.name] = coded_list(entry.name, values)
        else:
            columns[entry.name] = optional_integers(values, kind)
    return events_table(len(rows), columns)
