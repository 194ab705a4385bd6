"""A memory cgroup of a test's own: who takes more memory in it than it has is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Makes a cgroup with a limit, and removes it with all that still runs in it.

    Skips the test where none can be made: this needs root and the memory controller, of
    version 1 or 2 of cgroups.

    Args:
        limit: Bytes of memory for all its processes together, without swap.
    """
    try:
        path = _make(limit)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield path
    finally:
        _remove(path)


def _make(limit: int) -> Path:
    root, is_first_version = _controller()
    if not is_first_version and "memory" not in (root / "cgroup.subtree_control").read_text():
        (root / "cgroup.subtree_control").write_text("+memory")
    path = root / f"ddltrace-test-{os.getpid()}"
    path.mkdir()
    try:
        if is_first_version:
            (path / "memory.limit_in_bytes").write_text(str(limit))
            swap, most = path / "memory.memsw.limit_in_bytes", limit
        else:
            (path / "memory.max").write_text(str(limit))
            swap, most = path / "memory.swap.max", 0
        if swap.exists():  # a kernel without swap has no limit for it
            swap.write_text(str(most))
    except BaseException:
        path.rmdir()
        raise
    return path


def _controller() -> tuple[Path, bool]:
    """Where the memory controller is mounted, and whether it is of version 1.

    Raises:
        OSError: Nowhere.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(folder), True
        controllers = Path(folder) / "cgroup.controllers"
        if kind == "cgroup2" and "memory" in controllers.read_text().split():
            return Path(folder), False
    raise OSError("no memory controller is mounted")


def _remove(path: Path) -> None:
    while True:
        for process in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        try:
            return path.rmdir()
        except OSError:  # who was killed is not gone yet
            time.sleep(0.01)
