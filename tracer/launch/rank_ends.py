"""Observes from the launcher when and how each rank's process ends.

A killed rank cannot report its death, and ranks that waited for it end soon after. Only a common
observer can determine which rank ended first. The kernel notifies the launcher through a file
descriptor per process (pidfd), without polling.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import select
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.exit_status import shell_status
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.liveness import EXIT_CODE, STATE, pid_namespace, stat_fields
from ddltrace.tracer.trace.run_files import read_sidecar
from ddltrace.tracer.trace.trace_files import SIDECAR_SUFFIX

if TYPE_CHECKING:
    from ddltrace.tracer.trace.run_info import RankInfo

_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 0.5
_EAGER_S: Final = 30.0
"""Duration of frequent look-ups of new processes, because some die right after their start."""
_PATIENCE_S: Final = 5.0
# Linux's `ioctl` of a pidfd that fills a `struct pidfd_info`; the flag for the exit status of a
# process that was already waited for (since Linux 6.15); the offsets of flags and status in it.
_PIDFD_GET_INFO: Final = 0xC040FF0B
_PIDFD_INFO_EXIT: Final = 1 << 3
_PIDFD_INFO: Final = struct.Struct("=Q52xi")


class End(NamedTuple):
    """The end of a process.

    Attributes:
        ended_ns: Time, on the process's monotonic clock.
        exit_status: 128 + n if signal n killed it; None if unknown.
    """

    ended_ns: int
    exit_status: int | None


class RankEnds(threading.Thread):
    """Watches the processes of this host that record into a directory.

    Args:
        directory: The trace directory.

    Attributes:
        ends: The end of each process that has ended, by the name of its segment.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(name="ddltrace-rank-ends", daemon=True)
        self._directory = directory
        self._own_domain = clock_domain()
        self._began_ns = time.monotonic_ns()
        self._seen: set[str] = set()
        self._watched: dict[int, tuple[str, int]] = {}
        self._poll = select.poll()
        self._stop_reader, self._stop_writer = os.pipe()
        self._poll.register(self._stop_reader, select.POLLIN)
        self.ends: dict[str, End] = {}

    def run(self) -> None:
        """Watches until it is stopped. An end that cannot be observed is left out."""
        with contextlib.suppress(Exception):
            self._watch()
        for descriptor in (*self._watched, self._stop_reader):
            os.close(descriptor)

    def stop(self) -> None:
        """Stops watching. All ends so far are known then, unless the file system hangs."""
        with contextlib.suppress(OSError, RuntimeError):  # already stopped, or never started
            os.write(self._stop_writer, b"x")
            self.join(_PATIENCE_S)
        os.close(self._stop_writer)

    def _watch(self) -> None:
        pause_s, goes_on = _SHORTEST_S, True
        eager_until_s = time.monotonic() + _EAGER_S
        while goes_on:
            # Ranks appear when the job starts, and again after a restart.
            found = self._find()
            ready = {descriptor for descriptor, _ in self._poll.poll(pause_s * 1e3)}
            if found or ready:
                eager_until_s = time.monotonic() + _EAGER_S
            is_eager = time.monotonic() < eager_until_s
            pause_s = _SHORTEST_S if is_eager else min(2 * pause_s, _LONGEST_S)
            goes_on = self._stop_reader not in ready
            for descriptor in ready & self._watched.keys():
                self._note_end(descriptor)

    def _find(self) -> bool:
        """Starts to watch new processes; returns whether there were any."""
        names = [
            entry.name
            for entry in os.scandir(self._directory)
            if entry.name.endswith(SIDECAR_SUFFIX)
            and entry.name.startswith("rank-")
            and entry.name not in self._seen
        ]
        for name in names:
            self._seen.add(name)
            with contextlib.suppress(OSError, AttributeError, TraceError):
                self._begin(read_sidecar(self._directory / name))
        return bool(names)

    def _begin(self, info: RankInfo) -> None:
        here = platform.node(), pid_namespace(), self._own_domain
        if info.pid is None or (info.host, info.pid_namespace, info.clock_domain) != here:
            return
        try:
            descriptor = os.pidfd_open(info.pid)
        except ProcessLookupError:
            # It died since the last look-up, unless it existed before this launcher.
            if info.clock.get("monotonic_ns", 0) > self._began_ns and info.status == "running":
                self.ends[info.segment] = End(time.monotonic_ns(), None)
            return
        self._watched[descriptor] = info.segment, info.pid
        self._poll.register(descriptor, select.POLLIN)

    def _note_end(self, descriptor: int) -> None:
        """Records the end of a process."""
        now = time.monotonic_ns()
        segment, pid = self._watched.pop(descriptor)
        self.ends[segment] = End(now, _exit_status(pid, descriptor))
        self._poll.unregister(descriptor)
        os.close(descriptor)


def _exit_status(pid: int, descriptor: int) -> int | None:
    """The exit status of a process that has ended and may have been waited for.

    Args:
        pid: The process.
        descriptor: Its pidfd.
    """
    for ask, of in ((_of_zombie, pid), (_of_reaped, descriptor)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            wait_status = ask(of)
            if wait_status is not None:
                return shell_status(os.waitstatus_to_exitcode(wait_status))
    return None


def _of_zombie(pid: int) -> int | None:
    """The status of a process that has not been waited for; None if it has."""
    if os.geteuid() not in (0, os.stat(f"/proc/{pid}").st_uid):
        return None  # its status would read as 0
    values = stat_fields(pid)
    return int(values[EXIT_CODE]) if values[STATE] == "Z" else None


def _of_reaped(descriptor: int) -> int | None:
    """The status of a process that was waited for; None if the kernel does not keep it."""
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    given, wait_status = _PIDFD_INFO.unpack(info)
    return wait_status if given & _PIDFD_INFO_EXIT else None
