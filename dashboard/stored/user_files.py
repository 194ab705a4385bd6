"""Files in the user's cache: its key, and notes that only this user can write."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.owner_access import is_private, make_private_folder, user_folder
from ddltrace.tracer.trace.json_files import write_json_atomically

_SECRET_BYTES: Final = 32


def user_secret() -> bytes:
    """The key that marks files as written by this user; made on first use.

    Raises:
        OSError: The user's cache cannot be written.
    """
    path = user_folder() / "cache.key"
    make_private_folder(path.parent)
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
            return json.loads(file.read()) if is_private(os.fstat(file.fileno())) else None
    except (OSError, ValueError):
        return None


def write_note(path: Path, value: dict[str, Any]) -> bool:
    """Writes a JSON file into the user's cache; returns whether it could be written."""
    try:
        make_private_folder(path.parent)
        write_json_atomically(path, value, private=True)
    except OSError:
        return False
    return True
