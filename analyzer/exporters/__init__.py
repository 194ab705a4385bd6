"""Writers of other tools' formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.errors import UsageError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

__all__ = ["FORMATS", "export"]

FORMATS: Final = ("chrome", "perfetto", "parquet", "csv")


def export(trace: Trace, to: str, path: Path, *, force: bool = False) -> int:
    """Writes a trace in another format; the file appears when it is complete.

    Args:
        trace: The trace.
        to: One of `FORMATS`.
        path: The file to write; Chrome JSON and CSV are compressed if it ends in ``.gz``.
        force: Whether a file that stands there may be replaced.

    Returns:
        The number of events written.

    Raises:
        UsageError: The format is not known, or the file exists or cannot be written.
        MissingCapabilityError: A package that the format needs is missing.
    """
    from ddltrace.analyzer.exporters.output import replacing

    with replacing(path, force=force) as temporary:
        return _writer(to)(trace, temporary)


def _writer(to: str) -> Callable[[Trace, Path], int]:
    from ddltrace.analyzer.exporters import chrome_json, parquet_csv, perfetto

    writers: dict[str, Callable[[Trace, Path], int]] = {
        "chrome": chrome_json.write,
        "perfetto": perfetto.write,
        "parquet": parquet_csv.write_parquet,
        "csv": parquet_csv.write_csv,
    }
    if to not in writers:
        raise UsageError(f"{to!r} is no format to export to: choose from {', '.join(FORMATS)}")
    return writers[to]
