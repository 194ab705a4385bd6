"""Exports flat tables as Parquet and CSV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.exporters.output import open_for_writing
from ddltrace.analyzer.formatting.csv_cells import without_formulas
from ddltrace.tracer.trace.schema import EVENTS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_BATCH: Final = 1 << 18

_PARQUET_SCHEMA: Final = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        *(
            pa.field(
                field.name,
                field.type.value_type if pa.types.is_dictionary(field.type) else field.type,
                field.nullable,
            )
            for field in EVENTS
        ),
        pa.field("tensor_names", pa.list_(pa.string())),
    ]
)
_CSV_SCHEMA: Final = pa.schema(
    [
        pa.field(field.name, pa.string() if pa.types.is_list(field.type) else field.type)
        for field in _PARQUET_SCHEMA
    ]
)


def write_parquet(trace: Trace, path: Path) -> int:
    """Writes all ranks' events into one Parquet file, with the rank as an additional column.

    Returns:
        The number of events written.
    """
    import pyarrow.parquet as pq

    written = 0
    with pq.ParquetWriter(path, _PARQUET_SCHEMA, compression="zstd") as writer:
        for part in _parts(trace):
            writer.write_table(part)
            written += part.num_rows
    return written


def write_csv(trace: Trace, path: Path) -> int:
    """Writes all ranks' events into one CSV file; lists of tensors are joined by semicolons.

    Returns:
        The number of events written.
    """
    import pyarrow.csv as pacsv

    written = 0
    with open_for_writing(path) as file, pacsv.CSVWriter(file, _CSV_SCHEMA) as writer:
        for part in _parts(trace):
            columns = [_as_text(column) for column in part.columns]
            writer.write_table(pa.Table.from_arrays(columns, schema=_CSV_SCHEMA))
            written += part.num_rows
    return written


def _parts(trace: Trace) -> Iterator[pa.Table]:
    """Every rank's events in bounded parts, dictionaries decoded."""
    for rank in trace.ranks:
        names = trace.tensor_names(rank)
        for table in trace.event_tables(rank):
            for first in range(0, table.num_rows, _BATCH):
                yield _part(table.slice(first, _BATCH), rank, names)


def _part(part: pa.Table, rank: int, names: dict[int, str]) -> pa.Table:
    columns = [pa.array([rank], pa.int32()).take(pa.array([0] * part.num_rows))]
    columns += [
        column.cast(_PARQUET_SCHEMA.field(field.name).type)
        if pa.types.is_dictionary(field.type)
        else column
        for field, column in zip(part.schema, part.columns, strict=True)
    ]
    columns.append(_tensor_names(part["tensors"], names))
    return pa.Table.from_arrays(columns, schema=_PARQUET_SCHEMA)


def _tensor_names(lists: pa.ChunkedArray, names: dict[int, str]) -> pa.Array:
    """The lists with names in place of ids."""
    combined = lists.combine_chunks()
    flat = pc.list_flatten(combined)
    distinct = flat.unique()
    texts = [names.get(number, f"tensor {number}") for number in distinct.to_pylist()]
    decoded = pa.array(texts, pa.string()).take(pc.index_in(flat, value_set=distinct))
    lengths = pc.list_value_length(combined).fill_null(0).to_numpy(zero_copy_only=False)
    ends = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
    return pa.ListArray.from_arrays(ends, decoded, mask=combined.is_null())


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_list(column.type):
        texts = pc.cast(column.combine_chunks(), pa.list_(pa.string()))
        # Each on its own: some spreadsheets begin a cell after a semicolon.
        inert = without_formulas(texts.values)
        column = pc.binary_join(
            pa.ListArray.from_arrays(texts.offsets, inert, mask=texts.is_null()), ";"
        )
    return without_formulas(column)
