"""Remembers the digests of files, which need not be read again as long as they are unchanged.

A file counts as unchanged as long as its inode, size and times are: every write changes the time of
the inode, which programs cannot set. A file that was changed just before it was read could change
again within the resolution of that time, so it is not remembered.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from ddltrace.dashboard.stored.user_files import read_note, write_note

_FORMAT: Final = 1
_SETTLED_NS: Final = 2_000_000_000


class VerifiedFiles:
    """The digests of some files, in a note that only this user can write.

    Args:
        note: The file of the note.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._lock = threading.Lock()
        self._known = _read(note)
        self._saved = dict(self._known)

    def known(self, path: Path) -> str | None:
        """The digest of a file that has not changed since; None if there is none."""
        found = self._known.get(str(path))
        if found is None or found[0] != _state(path):
            return None
        return str(found[1])

    def state(self, path: Path) -> list[int]:
        """The state of a file, to be taken before it is read.

        Raises:
            OSError: There is no such file.
        """
        return _state(path)

    def learn(self, path: Path, state: list[int], digest: str) -> None:
        """Remembers the digest of a file that was read after it had a state."""
        changed_ns = state[-1]
        if time.time_ns() - changed_ns < _SETTLED_NS:
            return
        with self._lock:
            self._known[str(path)] = [state, digest]

    def save(self) -> None:
        """Writes the note, if the user's cache can be written."""
        with self._lock:
            known = dict(self._known)
        if known == self._saved:
            return
        if write_note(self._note, {"format": _FORMAT, "files": known}):
            self._saved = known


def _state(path: Path) -> list[int]:
    status = os.stat(path)
    times = status.st_mtime_ns, status.st_ctime_ns
    return [status.st_dev, status.st_ino, status.st_size, *times]


def _read(note: Path) -> dict[str, list[object]]:
    try:
        noted = read_note(note)
        if noted["format"] != _FORMAT:
            return {}
        return {str(path): [state, digest] for path, (state, digest) in noted["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
