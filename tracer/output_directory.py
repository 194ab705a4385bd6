"""Directories that a command makes for what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddltrace.tracer.errors import UnwritableError, UsageError


def make_empty(directory: Path, *, marker: str, kind: str, force: bool) -> None:
    """Makes an empty directory.

    Args:
        directory: Which.
        marker: A file by which one of an earlier command is known.
        kind: What it then holds, for messages: a "trace".
        force: Whether such a one may be deleted.

    Raises:
        UsageError: Something stands there and must not, or cannot, be replaced.
        UnwritableError: The disk does not let us.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            if not force:
                raise is_taken(directory)
            if not (directory / marker).is_file():
                raise UsageError(f"{directory} holds no {kind}: --force replaces only {kind}s")
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_made(directory, error) from error


def is_taken(directory: Path) -> UsageError:
    """What to raise when something stands there already."""
    return UsageError(f"{directory} exists: choose another with -o, or add --force")


def cannot_be_made(directory: Path, error: OSError) -> UsageError:
    """What to raise when a directory cannot be made: is it the user's fault or the disk's?"""
    in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
    kind = UsageError if in_the_way else UnwritableError
    return kind(f"{directory} cannot be made: {error.strerror}")
