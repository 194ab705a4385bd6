"""Reading and writing ``run.json`` and the rank processes' own records."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import TraceError, is_store_failure
from ddltrace.tracer.storage.location import Location, matches
from ddltrace.tracer.trace.json_files import (
    overwrite_json,
    read_json,
    release_space,
    write_with_reserve,
)
from ddltrace.tracer.trace.run_info import (
    GroupInfo,
    RankInfo,
    RunInfo,
    rank_from_json,
    run_from_json,
    run_to_json,
    share_groups,
)
from ddltrace.tracer.trace.schema import LARGE_RUN_SCHEMA_NAME, SCHEMA_NAME
from ddltrace.tracer.trace.trace_files import RUN_FILE, SIDECAR_SUFFIX

CHANGED: Final = f"{RUN_FILE} is not what ddltrace wrote: its numbers may be wrong"
"""Note on a run whose content does not match the stored checksum."""

_CHECKSUM: Final = "checksum"
_SPARE_BYTES: Final = 4096


def write_run(directory: Path, run: RunInfo) -> None:
    """Writes ``run.json``, with a checksum of its content; see `overwrite_run`."""
    spare = _SPARE_BYTES if run.status == "running" else 0
    write_with_reserve(directory / RUN_FILE, _with_checksum(run), spare=spare)


def overwrite_run(directory: Path, run: RunInfo) -> None:
    """Changes the ``run.json`` of a running job where no other file can be written.

    Raises:
        OSError: This file cannot be written either.
    """
    overwrite_json(directory / RUN_FILE, _with_checksum(run))


def _with_checksum(run: RunInfo) -> dict[str, Any]:
    # As a reader gets it: JSON has neither tuples nor numeric keys.
    value: dict[str, Any] = json.loads(json.dumps(run_to_json(run)))
    return {**value, _CHECKSUM: _checksum_of(value)}


def _checksum_of(value: dict[str, Any]) -> int:
    """CRC-32 of a JSON object, independent of its formatting."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode("ascii"))


def read_run_file(directory: Location) -> RunInfo:
    """Reads ``run.json`` unchanged; `run_reader.read_run` adds the records of the ranks' files.

    Raises:
        TraceError: The directory holds no trace that this version can read.
    """
    path = directory / RUN_FILE
    if not path.exists():
        if not directory.exists():
            raise TraceError(f"{directory} does not exist")
        raise TraceError(
            f"{directory} is not a trace: it has no {RUN_FILE} "
            "(record one with: ddltrace run -o DIR -- COMMAND)"
        )
    value = read_json(path)
    schema = value.get("schema")
    if schema not in (SCHEMA_NAME, LARGE_RUN_SCHEMA_NAME):
        raise TraceError(
            f"{path}: schema {schema!r:.80} is not {SCHEMA_NAME!r}; "
            "read it with the version of ddltrace that wrote it"
        )
    try:
        expected = value.pop(_CHECKSUM, None)
        changed = expected is not None and expected != _checksum_of(value)
        run = run_from_json(value)
        if changed and CHANGED not in run.notes:
            run.notes.append(CHANGED)
        if changed and run.status != "running":
            run.status = "partial"
        return run
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TraceError(f"{path} is damaged: {error!r:.120}") from error


def write_sidecar(directory: Path, info: RankInfo) -> None:
    """Writes the record of a rank process."""
    write_with_reserve(directory / (info.segment + SIDECAR_SUFFIX), info.to_json())


def read_sidecars(directory: Location, notes: list[str]) -> list[RankInfo]:
    """Reads the record of every rank process; an unreadable file becomes a note."""
    infos = []
    groups: dict[GroupInfo, GroupInfo] = {}
    for path in matches(directory, f"rank-*{SIDECAR_SUFFIX}"):
        try:
            infos.append(read_sidecar(path))
        except TraceError as error:
            if is_store_failure(error):
                raise
            notes.append(f"{path.name} cannot be read ({error!s:.80}): its rank is left out")
        else:
            share_groups(infos[-1], groups)
    return infos


def read_sidecar(path: Location) -> RankInfo:
    """Reads the record of one rank process.

    Raises:
        TraceError: It is damaged.
    """
    try:
        info = rank_from_json(read_json(path))
    except ValueError as error:
        raise TraceError(str(error)) from error
    if path.name != info.segment + SIDECAR_SUFFIX:
        raise TraceError(f"it is a copy of {info.segment + SIDECAR_SUFFIX}")
    return info


def remove_unrecorded(directory: Path) -> None:
    """Removes a trace in which nothing was recorded."""
    release_space(directory / RUN_FILE)
    with contextlib.suppress(OSError):
        (directory / RUN_FILE).unlink()
        directory.rmdir()
