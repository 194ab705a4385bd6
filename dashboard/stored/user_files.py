"""Files in the user's cache: its folder, its key, and notes that only this user can write."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.trace.json_files import write_json_atomically

_SECRET_BYTES: Final = 32


def user_folder() -> Path:
    """The folder of ddltrace in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddltrace"


def user_secret() -> bytes:
    """The key that marks files as written by this user; made on first use.

    Raises:
        OSError: The user's cache cannot be written.
    """
    path = user_folder() / "cache.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if len(secret := path.read_bytes()) == _SECRET_BYTES:
            return secret
        path.unlink()
    # Linked into place: a concurrent process sees a whole key or none.
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
    return path.read_bytes()


def read_note(path: Path) -> Any:
    """Reads a JSON file that only this user can have written; None if there is none."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read()) if is_private(file.fileno()) else None
    except (OSError, ValueError):
        return None


def write_note(path: Path, value: dict[str, Any]) -> bool:
    """Writes a JSON file into the user's cache; returns whether it could be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, value)
    except OSError:
        return False
    return True


def is_private(descriptor: int) -> bool:
    """Whether no other user (but root) can have written to an open file."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
