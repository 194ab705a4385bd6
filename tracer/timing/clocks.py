"""Identifies the clock of a process.

All times are ``CLOCK_MONOTONIC``. Linux keeps one such clock per boot of a host, a time namespace
shifts it, and a preloaded library can replace it. Processes are assumed to share a clock only if
all of these are equal; the exchanges with rank 0 verify it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_GETTIME_SYSCALL: Final = {"x86_64": 228, "aarch64": 113, "riscv64": 113, "ppc64le": 246}
_CLOCK_MONOTONIC: Final = 1
_GRANULARITY_NS: Final = 1_000


def clock_domain() -> str:
    """Identifies the monotonic clock of this process.

    Processes with the same value share one clock. A process under a library that replaces the
    kernel's clock shares it with no other process.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = "time:[none]"
    domain = f"{boot} {namespace}"
    if is_clock_interposed():
        return f"{domain} interposed:{socket.gethostname()}:{os.getpid()}"
    return domain


def is_clock_interposed() -> bool:
    """Whether a library between this process and the kernel changes the monotonic clock."""
    try:
        if "libfaketime" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
            return True
    except OSError:
        pass  # no /proc: the readings below decide
    kernel_ns = _kernel_clock()
    if kernel_ns is None:
        return False
    return not any(_agree(kernel_ns) for _ in range(3))


def paired_reading() -> dict[str, int]:
    """Reads the monotonic and the wall clock as closely together as possible."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, unix)
    assert best is not None
    return {"monotonic_ns": best[1], "unix_ns": best[2], "reading_ns": best[0]}


def _agree(kernel_ns: Callable[[], int]) -> bool:
    before = kernel_ns()
    here = time.monotonic_ns()
    after = kernel_ns()
    return before - _GRANULARITY_NS <= here <= after + _GRANULARITY_NS


def _kernel_clock() -> Callable[[], int] | None:
    """A function that reads the kernel's clock by a system call, past any library."""
    number = _GETTIME_SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux" or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    reading = (ctypes.c_long * 2)()

    def kernel_ns() -> int:
        if syscall(number, _CLOCK_MONOTONIC, ctypes.byref(reading)) != 0:
            return time.monotonic_ns()  # a sandbox forbids the call: there is no reference
        return int(reading[0]) * 1_000_000_000 + int(reading[1])

    return kernel_ns
