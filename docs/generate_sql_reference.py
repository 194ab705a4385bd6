"""Writes `docs/sql-reference.md` from the tables of SQL: `python3 dev.py docs`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import generate_report_reference as reference
import pyarrow as pa

from ddltrace.analyzer import model
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS, OF_TRACE, TABLES, EventStream

PAGE = Path(__file__).with_name("sql-reference.md")

INTRODUCTION = """\
# Tables of SQL

Written by `python3 dev.py docs` from the tables; a test fails when the two differ.

`ddltrace query TRACE SQL` and the dashboard's page *SQL* run one SELECT, in DuckDB's dialect, over
these tables. Times with `_ns` are nanoseconds on rank 0's clock, durations with `_us`
microseconds. A value that the trace does not give is null.
[report-reference.md](report-reference.md#times-and-counts) defines the times.

```
ddltrace query sample_traces/straggler "SELECT op, count(*), sum(wait_us) FROM messages GROUP BY op"
```
"""

RECORDS: Final[Mapping[str, type]] = {
    name: measure.rows for name, measure in model.MEASURES.items() if measure.rows
}
"""Tables whose rows are records of the report."""


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION, _events(EventStream.schema)]
    for name in TABLES[1:]:
        make = OF_TRACE.get(name) or OF_ANALYSIS[name]
        text = inspect.getdoc(make) or ""
        summary = text.partition("\n\n")[0].partition(", columns as in")[0].rstrip(".")
        columns = reference.attributes(make, "Columns")
        if name in RECORDS:
            columns = flat_columns(RECORDS[name])
        lines = [f"- `{column}`: {meaning}" for column, meaning in columns.items()]
        summary = summary.replace("``", "`")
        parts.append(f"## `{name}`\n\n{summary}.\n\n" + "\n".join(lines) + "\n")
    return str(reference.with_places("\n".join(parts)))


def flat_columns(record: Any) -> dict[str, str]:
    """The columns of a record's table, with those of the records in it."""
    found: dict[str, str] = {}
    inner = dict(reference.records_of(record, ""))
    kinds = {place: kind for kind, place in inner.items()}
    meanings = reference.attributes(record)
    for name in (field.name for field in dataclasses.fields(record)):
        if name in kinds:
            prefix = model.PREFIXES.get(name, name)
            columns = reference.attributes(kinds[name])
            found |= {f"{prefix}_{column}": text for column, text in columns.items()}
        else:
            found[name] = meanings[name]
    return found


def _events(schema: pa.Schema) -> str:
    columns = ", ".join(f"`{name}`" for name in schema.names[1:])
    return (
        "## `events`\n\n"
        "One row per event of any rank.\n\n"
        "- `rank`: Global rank.\n"
        f"- {columns}: As in [the trace format](trace-format.md#one-row-per-event), times on rank "
        "0's clock.\n"
    )


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
