"""The folder of ddltrace in the user's cache, and who may have written a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

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


def is_private(descriptor: int) -> bool:
    """Whether no other user (but root) can have written to an open file."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
