"""JSON files that are replaced atomically and can be written when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.storage.plain_files import open_plain, replacing

_MAX_JSON_BYTES: Final = 256 << 20
_RESERVED_BYTES: Final = 256 << 10


def reserve_space(path: Path) -> None:
    """Reserves disk space, so that a full disk can be reported; see `write_with_reserve`."""
    with contextlib.suppress(OSError), open(_reserve_of(path), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)


def release_space(path: Path) -> None:
    """Releases the space reserved for a file."""
    with contextlib.suppress(OSError):
        _reserve_of(path).unlink(missing_ok=True)


def write_with_reserve(path: Path, value: dict[str, Any], *, spare: int = 0) -> None:
    """Writes a JSON file atomically; on a full disk, into the space reserved for it.

    Args:
        path: The file.
        value: Its new content.
        spare: Bytes by which the file is longer than necessary; see `overwrite_json`.

    Raises:
        OSError: The reserved space does not suffice.
    """
    try:
        write_json_atomically(path, value, spare=spare)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        release_space(path)
        write_json_atomically(path, value, spare=spare)
        reserve_space(path)


def overwrite_json(path: Path, value: dict[str, Any]) -> None:
    """Overwrites a JSON file within its size, which takes no space on the disk.

    Raises:
        OSError: The content is too long, or the file cannot be written.
    """
    text = json.dumps(value).encode()
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if len(text) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(text.ljust(size))


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def write_json_atomically(
    path: Path, value: dict[str, Any], *, private: bool = False, spare: int = 0
) -> None:
    """Replaces a JSON file so that a reader sees the old text or the new, never a mixture.

    Those who could not read the old file cannot read the new one.

    Args:
        path: The file.
        value: Its new content.
        private: Whether only this user has access to it, instead of whom the umask allows.
        spare: Bytes by which the file is longer than necessary.
    """
    with replacing(path, most=0o600 if private else 0o666) as file:
        file.write((json.dumps(value, indent=1) + " " * spare).encode())


def read_json(path: Location) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        TraceError: The file cannot be read, is too large, or holds no JSON object.
    """
    try:
        with open_plain(path) as file:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise TraceError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MB: not a trace's")
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read: {error!s:.120}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path} is damaged: not a JSON object")
    return value
