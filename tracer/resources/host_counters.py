"""Counters of the rank's process and of its host, read with psutil."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.trace.counters import Reading

_SCHEDSTAT: Final = Path("/proc/self/schedstat")


class HostCounters:
    """Reads the counters of this process and, if asked to, of its host.

    Shares and rates are of the time since the previous sample, so the first sample has none.

    Args:
        whole_host: Whether to read the counters of the host and its network interfaces too, which
            one rank per host does.

    Raises:
        ImportError: psutil is not installed.
    """

    def __init__(self, *, whole_host: bool) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process: Any = psutil.Process()
        self._whole_host = whole_host
        self._former: dict[str, tuple[float, float]] = {}

    def sample(self) -> Iterator[Reading]:
        """Reads every counter once; a counter that the system does not provide is left out."""
        yield from self._of_process()
        if self._whole_host:
            yield from self._of_host()
            yield from self._of_network()

    def _of_process(self) -> Iterator[Reading]:
        with self._process.oneshot():
            times = self._process.cpu_times()
            memory = self._process.memory_info().rss
        now_s = time.monotonic()
        cpu = self._rate("process_cpu", times.user + times.system, now_s)
        if cpu is not None:
            yield Reading("process_cpu", cpu)
        yield Reading("process_memory", memory)
        waited_ns = _main_thread_waited_ns()
        if waited_ns is not None:
            share = self._rate("process_cpu_wait", waited_ns / 1e9, now_s)
            if share is not None:
                yield Reading("process_cpu_wait", min(share, 1.0))

    def _of_host(self) -> Iterator[Reading]:
        times = self._psutil.cpu_times()
        # Linux includes the time of guests in `user` and `nice`.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        total = sum(times) - guests
        idle = times.idle + getattr(times, "iowait", 0.0)
        busy = self._rate("host_cpu", total - idle, total)
        if busy is not None:
            yield Reading("host_cpu", min(max(busy, 0.0), 1.0))
        processors = self._psutil.cpu_count()
        if processors is not None:
            yield Reading("host_processors", processors)
        memory = self._psutil.virtual_memory()
        yield Reading("host_memory_used", memory.total - memory.available)
        yield Reading("host_memory_total", memory.total)

    def _of_network(self) -> Iterator[Reading]:
        for interface, count in self._psutil.net_io_counters(pernic=True).items():
            if not (count.bytes_sent or count.bytes_recv):
                continue  # never used
            yield Reading("network_sent", count.bytes_sent, interface)
            yield Reading("network_received", count.bytes_recv, interface)

    def _rate(self, name: str, value: float, at: float) -> float | None:
        """The growth of a value per unit of `at` since the previous sample; None at the first."""
        former = self._former.get(name)
        self._former[name] = value, at
        if former is None or at <= former[1]:
            return None
        return (value - former[0]) / (at - former[1])


def _main_thread_waited_ns() -> int | None:
    """How long the main thread was runnable without a processor; None if the kernel hides it.

    The second number of the file (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    try:
        return int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
