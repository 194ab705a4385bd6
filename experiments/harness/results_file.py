"""Reads and writes an experiment's results: ``results.json`` and ``results.arrow``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from ddltrace.experiments.harness.file_names import ARROW_FILE, RESULTS_FILE
from ddltrace.experiments.harness.measurement import measure
from ddltrace.experiments.harness.results import SCHEMA, Results, Row, Run, summarize
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.plain_files import open_plain, replacing
from ddltrace.tracer.trace.json_files import write_json_atomically
from ddltrace.tracer.trace.trace_files import RUN_FILE

STEPS: Final = pa.schema(
    [
        pa.field("strategy", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("status", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("steady", pa.bool_(), nullable=False),
        pa.field("wall_us", pa.float64()),
        pa.field("elapsed_us", pa.float64()),
        pa.field("loss", pa.float64()),
    ],
    metadata={b"ddltrace.schema": SCHEMA.encode()},
)
"""Columns of ``results.arrow``: one row per run and step. `wall_us` is known of steady steps."""


def write(results: Results, directory: Path) -> None:
    """Writes ``results.json`` and ``results.arrow``, each replaced whole."""
    write_json_atomically(directory / RESULTS_FILE, results.to_json())
    with replacing(directory / ARROW_FILE) as file, pa.ipc.new_file(file, STEPS) as writer:
        writer.write_table(steps_table(results))


def steps_table(results: Results) -> pa.Table:
    """Every step of every run as one row; columns as in `STEPS`."""
    columns: dict[str, list[Any]] = {name: [] for name in STEPS.names}
    for row in results.rows:
        for run in row.runs:
            _add_steps(columns, row.strategy, run)
    arrays = [
        pa.array(columns[field.name], type=_plain(field.type)).cast(field.type) for field in STEPS
    ]
    return pa.Table.from_arrays(arrays, schema=STEPS)


def load(path: Path) -> Results:
    """Reads an experiment's directory, or measures a trace.

    Args:
        path: A directory with ``results.json``, or a trace.

    Returns:
        The results; those of a trace have one row.

    Raises:
        TraceError: It is neither, or is damaged.
    """
    file = path / RESULTS_FILE
    if file.exists():
        return read(file)
    if (path / RUN_FILE).is_file() or path.is_file():
        run = measure(path, steps=None)
        return Results(rows=[summarize(run.strategy, [run])], status="complete")
    raise TraceError(
        f"{path} is neither an experiment ({RESULTS_FILE}) nor a trace ({RUN_FILE}); "
        "make one with: ddltrace experiment run -o DIR"
    )


def read(file: Path) -> Results:
    """Reads ``results.json``.

    Raises:
        TraceError: It cannot be read, or is damaged or of another schema.
    """
    try:
        with open_plain(file) as opened:
            value = msgspec.json.decode(opened.read())
        if value["schema"] != SCHEMA:
            raise TraceError(
                f"{file}: schema {value['schema']!r:.80} is not {SCHEMA!r}; "
                "read it with the version of ddltrace that wrote it"
            )
        results = Results(
            settings=msgspec.convert(value["settings"], dict[str, Any]),
            rows=msgspec.convert(value["rows"], list[Row]),
            baseline=msgspec.convert(value["baseline"], str | None),
            status=msgspec.convert(value["status"], str),
            progress=msgspec.convert(value.get("progress", {}), dict[str, Any]),
        )
        _check_traces(results, file)
        return results
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{file} is damaged: {error!r:.120}") from error


def _check_traces(results: Results, file: Path) -> None:
    """Checks that the results name traces of their own directory, and no link out of it.

    Raises:
        TraceError: They do not.
    """
    inside = file.parent.resolve()
    named = [each.trace for row in results.rows for each in row.runs]
    for name in dict.fromkeys([*named, *(row.trace for row in results.rows)]):
        if name is not None and not (inside / name).resolve().is_relative_to(inside):
            raise TraceError(f"{file} names a trace outside its directory: {name!r:.80}")


def _add_steps(columns: dict[str, list[Any]], strategy: str, run: Run) -> None:
    first = run.first_step or 0
    count = max(len(run.losses), len(run.elapsed_us), first + len(run.step_us))
    for step in range(count):
        steady = first <= step < first + len(run.step_us)
        columns["strategy"].append(strategy)
        columns["round"].append(run.round)
        columns["seed"].append(run.seed)
        columns["status"].append(run.status)
        columns["step"].append(step)
        columns["steady"].append(steady)
        columns["wall_us"].append(run.step_us[step - first] if steady else None)
        columns["elapsed_us"].append(_at(run.elapsed_us, step))
        columns["loss"].append(_at(run.losses, step))


def _at(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type in which values are given: dictionaries are encoded afterwards."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind
