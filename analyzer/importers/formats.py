"""Determines the format of a file, and reads it with the reader of that format."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.analyzer.importers import flight_recorder, nccl_inspector, nccl_rings
from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.chakra import chakra_reader
from ddltrace.analyzer.importers.chrome import chrome_reader, horovod
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.kineto import kineto_reader
from ddltrace.analyzer.importers.other_files import HEAD_BYTES, is_mistakable, kind_of_file
from ddltrace.analyzer.importers.rank_files import ASCEND_FOLDER, names_rank
from ddltrace.analyzer.importers.straggler_analysis import straggler_reader
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.storage.plain_files import DIRECTORY, PLAIN, kind_of
from ddltrace.tracer.trace.trace_files import RUN_FILE

_MOST_NAMED: Final = 100
_ASCEND_FILE: Final = "trace_view.json"
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
        nccl_rings,
        flight_recorder,
        chakra_reader,
        straggler_reader,
        chrome_reader,
    )
)


_MAX_DEPTH: Final = 4
_MAX_FOLDERS: Final = 1 << 14
"""Folders below the given one that are looked into: of how many levels, and how many."""


def recognizes(*paths: Path) -> bool:
    """Whether any file, or any file of a folder, is of a format that can be imported."""
    return any(_format_of(file) is not None for path in paths for file in _files(path))


def read(path: Path | Sequence[Path], engine: Engine | None = None) -> ImportedTrace:
    """Reads a file, or the files of a folder as the ranks of one job.

    Args:
        path: A file or a folder; or several that belong to one job.
        engine: Reads the files of a folder in tasks, if their format allows; by default this
            machine does.

    Returns:
        The trace. Its `notes` list omissions and guesses.

    Raises:
        TraceError: There is nothing of a known format, or it is damaged beyond use.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    by_format: dict[_Format, list[Path]] = defaultdict(list)
    others = []
    for file in dict.fromkeys(file for each in paths for file in _files(each)):
        found = _format_of(file)
        if found is None:
            others.append(file)
        else:
            by_format[found].append(file)
    if not by_format:
        known = ", ".join(each.name for each in _FORMATS)
        if (unread := describe_unread(paths[0])) is not None:
            raise TraceError(unread)
        raise TraceError(f"{paths[0]} is not in a format that can be imported ({known})")
    chosen = max(by_format, key=lambda each: len(by_format[each]))
    files = by_format[chosen]
    by_tasks = engine is not None and chosen.name == kineto_reader.NAME and len(files) > 1
    trace = kineto_reader.read(files, engine) if by_tasks else chosen.read(files)
    left_out = sum(len(files) for each, files in by_format.items() if each is not chosen)
    if left_out:
        trace.run.notes.append(
            f"{counted(left_out, 'file')} of another format left out: read formats one by one"
        )
    if (omitted := _left_out(paths)) is not None:
        trace.run.notes.append(omitted)
        trace.run.status = "partial"
    # An empty or unreadable trace file must be reported.
    suspects = [file.name for file in others if file.name.endswith((".json", ".json.gz"))]
    if suspects and (len(paths) > 1 or paths[0].is_dir()):
        shown = suspects[0][:60]
        trace.run.notes.append(
            f"{counted(len(suspects), 'file', 'is')} of no known format, such as {shown!r}"
        )
        trace.run.status = "partial"
    return trace


def _files(path: Path) -> list[Path]:
    """The path itself, or the visible files of a folder, ``rank10`` behind ``rank2``.

    If none of them can be imported, those in the folders below whose names name a rank.
    """
    if not path.is_dir():
        return [path] if path.is_file() else []
    if path.name != ASCEND_FOLDER and kind_of(path / ASCEND_FOLDER) == DIRECTORY:
        files = [path / ASCEND_FOLDER / _ASCEND_FILE]
        files = files if kind_of(files[0]) == PLAIN else []
    else:
        files = [each for each in _visible(path) if kind_of(each) == PLAIN]
        _check_number(path, files)
        if not any(_format_of(file) is not None for file in files):
            files = _files_below(path) or files
    return sorted(files, key=lambda file: [_natural(part) for part in file.parts])


def _files_below(path: Path) -> list[Path]:
    """The files in folders below one whose names, or those of their folders, name a rank.

    Links to folders are not followed. Nothing if a folder holds traces of ``ddltrace run``.
    """
    found: list[Path] = []
    for number, (at, folders, names) in enumerate(os.walk(path)):
        name = Path(at)
        below = name.relative_to(path)
        folders[:] = [each for each in folders if each[0] != "."]
        if len(below.parts) >= _MAX_DEPTH or number > _MAX_FOLDERS:
            folders.clear()
        if name == path:
            continue
        if RUN_FILE in names:
            return []
        if ASCEND_FOLDER in folders:
            folders[:] = [ASCEND_FOLDER]
            continue
        if name.name == ASCEND_FOLDER:
            found += [name / _ASCEND_FILE] if kind_of(name / _ASCEND_FILE) == PLAIN else []
            continue
        found += [
            name / each
            for each in names
            if each[0] != "." and names_rank(below / each) and kind_of(name / each) == PLAIN
        ]
        _check_number(path, found)
    return found


def _visible(folder: Path) -> Iterator[Path]:
    """The entries of a folder that are not hidden."""
    return (each for each in folder.iterdir() if each.name[0] != ".")


def _left_out(paths: Sequence[Path]) -> str | None:
    """A note on the entries of folders that are not plain files or directories, such as links."""
    found = [
        f"{each.name!r:.60} is {kind}"
        for path in paths
        if path.is_dir()
        for each in sorted(_visible(path))
        if (kind := kind_of(each)) not in {PLAIN, DIRECTORY}
    ]
    if not found:
        return None
    return f"{counted(len(found), 'entry')} of the folder left out: {found[0]}, not {PLAIN}"


def _check_number(path: Path, files: Sequence[Path]) -> None:
    if len(files) > MAX_FILES:
        raise TraceError(f"{path} holds {len(files)} files: choose a folder of one job's traces")


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part)
        for part in re.split(r"(\d+)", name)
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
    if (omitted := _left_out([path])) is not None:
        return f"{path} holds nothing to import: {omitted}"
    inside = (
        Path(at, name)
        for at, _, names in itertools.islice(os.walk(path), _MOST_NAMED)
        for name in names
    )
    for file in itertools.islice(inside, _MOST_NAMED):
        if file.parent != path and kind_of(file) == PLAIN and _format_of(file) is not None:
            return (
                f"{path} has files that can be imported in its folders ({file.parent.name}), but "
                "neither the folders' names nor the files' name a rank: give the folder or the "
                "files of one job, or name them rank0, rank1 and so on"
            )
    return None
