"""Copies files from a store to this machine, for code that needs files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import copy_plain


@contextlib.contextmanager
def local_copy(location: Location, most_files: int) -> Iterator[Path]:
    """Copies a file, or the files of a directory, into a temporary directory.

    Args:
        location: The file or directory; a local path is not copied.
        most_files: A directory with more files is refused.

    Yields:
        A local path with the same name.

    Raises:
        StoreError: The store cannot be read.
        TraceError: The directory holds too many files, or there is no space for them.
    """
    if isinstance(location, Path):
        yield location
        return
    files = [location]
    if location.is_dir():
        files = [path for path in location.iterdir() if path.is_file() and path.name[0] != "."]
        if len(files) > most_files:
            raise TraceError(f"{location} holds {len(files)} files: choose one job's directory")
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
        copied = Path(name, location.name)
        try:
            if location.is_dir():
                copied.mkdir()
            for file in files:
                target = copied / file.name if copied.is_dir() else copied
                copy_plain(file, target)
        except OSError as error:
            raise TraceError(f"{location} cannot be copied here: {error.strerror}") from error
        yield copied
