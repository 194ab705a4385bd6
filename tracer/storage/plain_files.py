"""Opens, lists and copies the files of a trace, which may come from a stranger: plain files only.

A link can lead out of a trace, and a pipe or a device never ends. The directory that the user names
may itself be a link: that is the user's choice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.owner_access import let_owner_use
from ddltrace.tracer.storage.location import PART_PREFIX, Location

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY
_PIECE_BYTES: Final = 8 << 20
_NOTHING: Final = "nothing"
PLAIN: Final = "a plain file"
DIRECTORY: Final = "a directory"
_KINDS: Final = {
    stat.S_IFREG: PLAIN,
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: Path) -> str:
    """What is at a path, such as "a link"; "nothing" if that cannot be found out."""
    try:
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "of an unknown kind")
    except OSError:
        return _NOTHING


def open_plain(path: Location) -> BinaryIO:
    """Opens a plain file for reading.

    Nothing else is opened even if it takes the place of the file at this moment, or if a link takes
    the place of the part of a trace that holds it.

    Raises:
        OSError: It is not a plain file, or cannot be opened.
        StoreError: It is in a store and cannot be read.
    """
    if not isinstance(path, Path):
        return path.open("rb")
    # Looked at first: opening a device can have effects.
    if (kind := kind_of(path)) not in {PLAIN, _NOTHING}:
        raise OSError(f"not a plain file, but {kind}")
    folder = path.parent
    no_link = os.O_NOFOLLOW if folder.name.startswith(PART_PREFIX) else 0
    parent = os.open(folder, _FOLDER_FLAGS | no_link)
    try:
        descriptor = os.open(path.name, _FLAGS, dir_fd=parent)
    finally:
        os.close(parent)
    return _checked(descriptor)


def open_given(path: Path) -> BinaryIO:
    """Opens a file for reading that the user named, perhaps by a link, or that is such a file.

    Raises:
        OSError: It is, or leads to, no plain file; or it cannot be opened.
    """
    descriptor = os.open(path, _FLAGS & ~os.O_NOFOLLOW)
    return _checked(descriptor)


def _checked(descriptor: int) -> BinaryIO:
    """An opened file, closed again if it is not a plain one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a plain file")
    return os.fdopen(descriptor, "rb")


def copy_plain(source: Location, target: Path) -> None:
    """Copies a plain file to a new file, which no one may read who may not read the source.

    Raises:
        StoreError: The store cannot be read.
        OSError: The source is not a plain file, or the target cannot be written.
    """
    with open_plain(source) as reader, create_like(source, target) as writer:
        shutil.copyfileobj(reader, writer, _PIECE_BYTES)


@contextlib.contextmanager
def local_copy(location: Location, most_files: int) -> Iterator[Path]:
    """Copies a file, or the files of a directory, from a store into a temporary directory.

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
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
        copied = Path(name, location.name)
        files = [(location, copied)]
        if location.is_dir():
            found = [path for path in location.iterdir() if path.is_file() and path.name[0] != "."]
            if len(found) > most_files:
                raise TraceError(f"{location} holds {len(found)} files: choose one job's directory")
            files = [(path, copied / path.name) for path in found]
        try:
            if location.is_dir():
                copied.mkdir()
            for source, target in files:
                copy_plain(source, target)
        except OSError as error:
            raise TraceError(f"{location} cannot be copied here: {error.strerror}") from error
        yield copied


def create_like(source: Location, target: Path, most: int = 0o666) -> BinaryIO:
    """Creates a file for what comes from another: no one else may read it.

    Args:
        source: The file that the content comes from; there may be none yet.
        target: The file to create. What is there is removed.
        most: The permissions of a file that comes from none, before the umask.

    Raises:
        OSError: It cannot be created.
    """
    mode = most
    if isinstance(source, Path):
        with contextlib.suppress(FileNotFoundError):
            mode = source.lstat().st_mode & most
    target.unlink(missing_ok=True)
    # Exclusively, so that a link that takes its place at this moment is not followed.
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL
    descriptor = os.open(target, flags, mode)
    let_owner_use(descriptor)
    return os.fdopen(descriptor, "wb")


@contextlib.contextmanager
def replacing(path: Path, most: int = 0o666) -> Iterator[BinaryIO]:
    """A file that takes the place of another one when it is complete.

    A reader sees the old content or the new, never a mixture; those who could not read the old file
    cannot read the new one.

    Args:
        path: The file to replace; there may be none yet.
        most: As in `create_like`.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with create_like(path, temporary, most) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
