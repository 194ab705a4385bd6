"""Determines the format of a file, and reads it with the reader of that format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.analyzer.importers import flight_recorder, nccl_inspector
from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.chakra import chakra_reader
from ddltrace.analyzer.importers.chrome import chrome_reader, horovod
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.kineto import kineto_reader
from ddltrace.analyzer.importers.other_files import HEAD_BYTES, is_mistakable, kind_of_file
from ddltrace.analyzer.importers.rank_files import rank_in_name
from ddltrace.analyzer.importers.straggler_analysis import straggler_reader
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.trace_files import RUN_FILE

_MOST_NAMED: Final = 100
MAX_FILES: Final = 1 << 16


class _Format(NamedTuple):
    name: str
    recognizes: Callable[[bytes], bool]
    read: Callable[[Sequence[Path]], ImportedTrace]


# In the order in which they are tried. Files of Kineto and Horovod are valid Chrome traces, so the
# more specific formats come first.
_FORMATS: Final = tuple(
    _Format(module.NAME, module.recognizes, module.read)
    for module in (
        kineto_reader,
        horovod,
        nccl_inspector,
        flight_recorder,
        chakra_reader,
        straggler_reader,
        chrome_reader,
    )
)


_ASCEND: Final = "ASCEND_PROFILER_OUTPUT/trace_view.json"
"""Where torch_npu puts the trace of a rank, in a folder of its own."""


def recognizes(path: Path) -> bool:
    """Whether a file, or any file of a folder, is of a format that can be imported."""
    return any(_format_of(file) is not None for file in _files(path))


def read(path: Path, engine: Engine | None = None) -> ImportedTrace:
    """Reads a file, or the files of a folder as the ranks of one job.

    Args:
        path: A file or a folder.
        engine: Reads the files of a folder in tasks, if their format allows; by default this
            machine does.

    Returns:
        The trace. Its `notes` list omissions and guesses.

    Raises:
        TraceError: There is nothing of a known format, or it is damaged beyond use.
    """
    by_format: dict[_Format, list[Path]] = defaultdict(list)
    others = []
    for file in _files(path):
        found = _format_of(file)
        if found is None:
            others.append(file)
        else:
            by_format[found].append(file)
    if not by_format:
        known = ", ".join(each.name for each in _FORMATS)
        if (unread := describe_unread(path)) is not None:
            raise TraceError(unread)
        raise TraceError(f"{path} is of no format that can be imported ({known})")
    chosen = max(by_format, key=lambda each: len(by_format[each]))
    files = by_format[chosen]
    by_tasks = engine is not None and chosen.name == kineto_reader.NAME and len(files) > 1
    trace = kineto_reader.read(files, engine) if by_tasks else chosen.read(files)
    left_out = sum(len(files) for each, files in by_format.items() if each is not chosen)
    if left_out:
        trace.run.notes.append(
            f"{left_out} files of other formats in the folder are left out: read them one by one"
        )
    # An empty or unreadable trace file must be reported.
    suspects = [file.name for file in others if file.name.endswith((".json", ".json.gz"))]
    if suspects and path.is_dir():
        shown = suspects[0][:60]
        trace.run.notes.append(f"{len(suspects)} files are of no known format: {shown!r} and on")
        trace.run.status = "partial"
    return trace


def _files(path: Path) -> list[Path]:
    """The path itself, or the visible files of a folder, ``rank10`` behind ``rank2``."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    entries = [entry for entry in path.iterdir() if entry.name[0] != "."]
    files = [entry for entry in entries if entry.is_file()]
    if ascend := sorted({*path.glob(_ASCEND), *path.glob(f"*/{_ASCEND}")}):
        return ascend
    if not files:  # perhaps each rank has a folder
        folders = [
            each for each in entries if each.is_dir() and rank_in_name(each.name) is not None
        ]
        files = [file for each in folders for file in each.iterdir() if file.is_file()]
        if any(file.name == RUN_FILE for file in files):
            return []
        files = [file for file in files if file.name[0] != "."]
    if len(files) > MAX_FILES:
        raise TraceError(f"{path} holds {len(files)} files: choose a folder of one job's traces")
    return sorted(files, key=lambda file: (_natural(file.parent), _natural(file)))


def _natural(path: Path) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def _format_of(file: Path) -> _Format | None:
    try:
        head = Blocks(file).head(HEAD_BYTES)
    except TraceError:
        return None
    # A memory snapshot is a pickle as a dump is, an execution trace resembles Chakra's.
    if is_mistakable(head):
        return None
    return next((each for each in _FORMATS if each.recognizes(head)), None)


def describe_unread(path: Path) -> str | None:
    """Names what a file, or the first known one of a folder, is that cannot be read."""
    for file in _files(path)[:_MOST_NAMED]:
        if (kind := kind_of_file(file)) is not None:
            return f"{file} is {kind}"
    return None
