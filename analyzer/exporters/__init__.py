"""Writers of other tools' formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.errors import UsageError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

__all__ = ["FOLDER_FORMATS", "FORMATS", "export"]

FORMATS: Final = ("chrome", "perfetto", "parquet", "csv", "chakra", "chakra-json")


FOLDER_FORMATS: Final = frozenset({"chakra", "chakra-json"})
"""Formats that have one file per rank, always."""


def export(
    trace: Trace, to: str, path: Path, *, force: bool = False, per_rank: bool = False
) -> int:
    """Writes a trace in another format; the file appears when it is complete.

    Args:
        to: One of `FORMATS`.
        path: The file to write (a folder for Chakra, which has one file per rank); Chrome JSON
            and CSV are compressed if it ends in ``.gz``.
        force: Whether an existing file may be replaced.
        per_rank: Whether `path` is a folder that gets one file per rank (Chrome JSON only), as
            torch.profiler writes them and Holistic Trace Analysis reads them.

    Returns:
        The number of events written.

    Raises:
        UsageError: The format is not known or has no files per rank, or the file exists or
            cannot be written.
        MissingCapabilityError: A package that the format needs is missing.
    """
    from ddltrace.analyzer.exporters.output import replacing, replacing_folder

    if per_rank and to != "chrome" and to not in FOLDER_FORMATS:
        raise UsageError(f"--per-rank goes with --to chrome: {to} is written as one file")
    if per_rank or to in FOLDER_FORMATS:
        with replacing_folder(path, force=force) as temporary:
            return _folder_writer(to)(trace, temporary)
    with replacing(path, force=force) as temporary:
        return _writer(to)(trace, temporary)


def _folder_writer(to: str) -> Callable[[Trace, Path], int]:
    from ddltrace.analyzer.exporters import chakra, chrome_json

    if to == "chrome":
        return chrome_json.write_each_rank
    return chakra.write_each_rank if to == "chakra" else chakra.write_json_of_each_rank


def _writer(to: str) -> Callable[[Trace, Path], int]:
    from ddltrace.analyzer.exporters import chrome_json, parquet_csv, perfetto

    writers: dict[str, Callable[[Trace, Path], int]] = {
        "chrome": chrome_json.write,
        "perfetto": perfetto.write,
        "parquet": parquet_csv.write_parquet,
        "csv": parquet_csv.write_csv,
    }
    if to not in writers:
        raise UsageError(f"{to!r} is not a format to export to: choose from {', '.join(FORMATS)}")
    return writers[to]
