"""Files and folders that appear only when they are complete."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

from ddltrace.tracer.errors import UsageError

_PARTIAL: Final = ".partial-"


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and moves the file to `path` on success.

    Args:
        path: Path of the file.
        force: Whether an existing file may be replaced.

    Raises:
        UsageError: The path exists and must not be replaced, or cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory: name a file with -o")
    if path.exists() and not force:
        raise UsageError(f"{path} exists: choose another with -o, or add --force")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.absolute().parent}")
    try:
        # A folder that no one else can write to. Writers choose compression by the file's name.
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=path.absolute().parent) as folder:
            temporary = Path(folder, path.name)
            yield temporary
            temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, and moves its files to `path` at the end.

    Args:
        path: The folder to create.
        force: Whether files of the same names in a folder that exists may be replaced.

    Raises:
        UsageError: The folder is not empty and `force` is not set, or it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: name a folder with -o")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise UsageError(f"{path} is not empty: choose another with -o, or add --force")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.absolute().parent}")
    try:
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=path.absolute().parent) as folder:
            yield Path(folder)
            path.mkdir(exist_ok=True)
            for file in Path(folder).iterdir():
                file.replace(path / file.name)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def open_for_writing(path: Path) -> IO[bytes]:
    """Opens a file, compressed if its name ends in ``.gz``."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=5))
    return path.open("wb")
