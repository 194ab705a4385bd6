"""A file of the tracer that stays intact even if the job closes the tracer's descriptor.

A job may close descriptors that it does not own, such as all descriptors or one of them twice. The
descriptor number can then be reused for a file of the job, and further writes would go to that
file. Before every write, this class therefore checks that the descriptor still refers to its own
file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ddltrace.tracer.owner_access import let_owner_use

_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC


class ProtectedFile:
    """Creates the file.

    Args:
        path: Path of the file.

    Raises:
        OSError: It cannot be created, or exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        let_owner_use(self._descriptor)
        self._identity = _identity(self._descriptor)
        self.length = 0

    def write(self, data: bytes) -> int:
        """Appends data completely or not at all.

        Raises:
            OSError: The disk is full, or another file is at the path.
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
        """Number of bytes written so far."""
        return self.length

    def flush(self) -> None:
        """Does nothing: writes are not buffered."""

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._descriptor is None

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and _identity(descriptor) == self._identity:
            os.close(descriptor)

    def _own(self) -> int:
        """A descriptor of the file: the original one, or a new one if the job closed it."""
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
    """Device and inode of an open descriptor; None if the descriptor is not open."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
