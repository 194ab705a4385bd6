"""A file that is open for as long as the job runs, and stays ours whatever the job does.

A job may close descriptors that are none of its own: all there are, or one twice. The number goes
to a file of the job's, and who writes on would write into that. So we look, before every write,
whether the number is still our file's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC


class ProtectedFile:
    """A new file, or an old one emptied.

    Args:
        path: Where it is.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o666)
        self._identity = _identity(self._descriptor)
        self.length = 0

    def write(self, data: bytes) -> int:
        """Appends, all or nothing.

        Raises:
            OSError: There is no room, or another file in its place.
        """
        descriptor = self._own()
        written = 0
        try:
            view = memoryview(data).cast("B")
            while written < len(view):
                written += os.pwrite(descriptor, view[written:], self.length + written)
        except OSError:
            if written:
                os.ftruncate(descriptor, self.length)
            raise
        self.length += written
        return written

    def tell(self) -> int:
        """Bytes so far."""
        return self.length

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._descriptor is None

    def close(self) -> None:
        """Lets go of the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and _identity(descriptor) == self._identity:
            os.close(descriptor)

    def _own(self) -> int:
        """A descriptor of the file: the one that it had, or a new one if that was closed."""
        if self._descriptor is None:
            raise OSError("the file is closed")
        if _identity(self._descriptor) != self._identity:
            self._descriptor = None
            descriptor = os.open(self._path, _FLAGS)
            if _identity(descriptor) != self._identity:
                os.close(descriptor)
                raise OSError("another file stands in the place of ours")
            self._descriptor = descriptor
        return self._descriptor


def _identity(descriptor: int) -> tuple[int, int] | None:
    """What tells a file from all others; None if the number stands for none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
