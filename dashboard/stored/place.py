"""Locations and content keys of the stored timeline and analysis of a trace.

They lie in the folder `FOLDER` of the trace directory or, where that cannot be written, in the
user's cache. Both can be deleted at any time. A file is named by the user who wrote it, so several
users of one trace do not overwrite each other's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from ddltrace.dashboard.stored.verified_files import VerifiedFiles
from ddltrace.tracer.owner_access import user_folder
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.trace_files import RUN_FILE, event_path

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

FOLDER: Final = ".ddltrace-cache"
FORMAT: Final = 7
"""Format version of the stored records; files of another format or ddltrace version are rebuilt."""


def content_key(trace: Trace, verified: VerifiedFiles) -> str:
    """A digest of the trace's files, the cache's format and ddltrace's version.

    Args:
        trace: The trace.
        verified: Knows the digests of files that have not changed.

    Raises:
        OSError: A file cannot be read.
    """
    files: list[Location] = [trace.path / RUN_FILE]
    files += [event_path(trace.path, info.segment) for info in trace.run.ranks]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        digests = list(pool.map(partial(_digest, verified), files))
    verified.save()
    parts = [str(FORMAT), metadata.version("ddltrace"), *digests]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest(verified: VerifiedFiles, path: Location) -> str:
    if not isinstance(path, Path):
        # Reading all of a store's files would cost as much as building again; ``run.json``, which
        # is read, has the checksums of the others.
        is_record = path.name == RUN_FILE
        what = hashlib.sha256(path.read_bytes()).hexdigest() if is_record else path.stat()
        return f"{path.name} {what}"
    if (known := verified.known(path)) is None:
        state = verified.state(path)
        with open_plain(path) as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        known = digest.hexdigest()
        verified.learn(path, state, known)
    return f"{path.name} {known}"


def folders(trace: Trace) -> list[Path]:
    """Folders that may hold the stored files of a trace, the preferred one first."""
    of_user = folder_of_user(trace)
    return [trace.path / FOLDER, of_user] if isinstance(trace.path, Path) else [of_user]


def verified_files(trace: Trace) -> VerifiedFiles:
    """What is known of the files of a trace, and of its stored files."""
    return VerifiedFiles(folder_of_user(trace) / "verified.json")


def folder_of_user(trace: Trace) -> Path:
    """The folder in the user's cache that belongs to a trace."""
    own = hashlib.sha256(str(trace.path.resolve()).encode()).hexdigest()[:32]
    return user_folder() / "traces" / own


def file_name(kind: str, secret: bytes) -> str:
    """Name of the file of a kind that the holder of a secret writes."""
    return f"{kind}-{hashlib.sha256(secret).hexdigest()[:12]}.bin"


def remove_others(folder: Path, kept: set[str], secret: bytes) -> None:
    """Removes the files of this user whose names are not among some: of an earlier content."""
    for path in folder.glob(file_name("*", secret)):
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def replacing(trace: Trace, name: str) -> Iterator[BinaryIO]:
    """Creates a file in the first writable folder; it appears when it is complete.

    Concurrent writers do not disturb each other; the last one to finish stays.

    Raises:
        OSError: No folder can be written.
    """
    handle, temporary = _temporary_file(folders(trace))
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        temporary.replace(temporary.with_name(name))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_file(candidates: list[Path]) -> tuple[int, Path]:
    last: OSError | None = None
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink():  # it could lead out of an untrusted trace
                raise NotADirectoryError(f"{folder} is a symbolic link")
            handle, name = tempfile.mkstemp(dir=folder, prefix=".building-")
        except OSError as error:
            last = error
        else:
            return handle, Path(name)
    assert last is not None
    raise last
