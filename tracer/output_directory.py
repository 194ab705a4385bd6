"""Creates the directories into which commands write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddltrace.tracer.errors import UnwritableError, UsageError


def make_room(
    directory: Path,
    kind: str,
    is_one: Callable[[Path], bool],
    remove: Callable[[Path], None],
    *,
    force: bool,
) -> None:
    """Creates a directory without files of the kind that is to be written there.

    Args:
        kind: What such a directory is called in messages, such as "trace".
        is_one: Whether a directory is one.
        remove: Removes the files of such a directory, and no others.
        force: Whether to remove them.

    Raises:
        UsageError: The directory exists and must not, or cannot, be replaced.
        UnwritableError: The file system refuses.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            if not force:
                raise is_taken(directory)
            if not is_one(directory):
                article = "an" if kind[0] in "aeiou" else "a"
                raise UsageError(
                    f"{directory} is not {article} {kind}: --force overwrites only {kind}s"
                )
            remove(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise creation_error(directory, error) from error


def check_new_file(path: Path, option: str, *, force: bool) -> None:
    """Checks before any work that a file can be written.

    Args:
        path: The file.
        option: The option that names it.
        force: Whether a file that exists may be replaced.

    Raises:
        UsageError: It exists and must not be replaced, or its directory does not exist.
    """
    if path.exists() and not force:
        raise UsageError(f"{option} {path} exists: choose another, or add --force")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.absolute().parent}")


def check_apart(source: Path, output: Path) -> None:
    """Checks that a directory that is read does not lie in the one that is written.

    Raises:
        UsageError: It does.
    """
    read, written = source.resolve(), output.resolve()
    if read == written:
        raise UsageError(f"{output} is one of the directories to read: choose another with -o")
    if read.is_relative_to(written):
        raise UsageError(f"{output} holds {source}, which is read: choose another with -o")


def is_taken(directory: Path) -> UsageError:
    """The error to raise if the directory exists."""
    return UsageError(f"{directory} exists: choose another with -o, or add --force")


def creation_error(directory: Path, error: OSError) -> UsageError:
    """Returns the error to raise if a directory cannot be created: `UsageError` if the user can fix
    it."""
    in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
    kind = UsageError if in_the_way else UnwritableError
    return kind(f"{directory} cannot be created: {error.strerror}")
