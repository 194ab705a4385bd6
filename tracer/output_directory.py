"""Creates the directories into which commands write."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddltrace.tracer.errors import UnwritableError, UsageError


def make_empty(directory: Path, *, marker: str, kind: str, force: bool) -> None:
    """Creates an empty directory.

    Args:
        directory: Its path.
        marker: A file that identifies a directory written by the same command.
        kind: What such a directory is called in messages, such as "trace".
        force: Whether to delete such a directory.

    Raises:
        UsageError: The directory exists and must not, or cannot, be replaced.
        UnwritableError: The file system refuses.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            if not force:
                raise is_taken(directory)
            if not (directory / marker).is_file():
                article = "an" if kind[0] in "aeiou" else "a"
                raise UsageError(
                    f"{directory} is not {article} {kind}: --force overwrites only {kind}s"
                )
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise creation_error(directory, error) from error


def is_taken(directory: Path) -> UsageError:
    """The error to raise if the directory exists."""
    return UsageError(f"{directory} exists: choose another with -o, or add --force")


def creation_error(directory: Path, error: OSError) -> UsageError:
    """Returns the error to raise if a directory cannot be created: `UsageError` if the user can fix
    it."""
    in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
    kind = UsageError if in_the_way else UnwritableError
    return kind(f"{directory} cannot be created: {error.strerror}")
