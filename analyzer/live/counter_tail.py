"""The newest values of one process's resource counters, while it runs."""

from __future__ import annotations

from pathlib import Path

from ddltrace.analyzer.live.stream_tail import StreamTail
from ddltrace.tracer.trace.counters import COUNTERS


class CounterTail:
    """Follows one counter stream.

    Args:
        path: The stream.

    Attributes:
        last: Counter of the process or host -> its newest value.

    Raises:
        OSError: The stream cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._tail = StreamTail(path, COUNTERS, COUNTERS.names)
        self.last: dict[str, float] = {}

    def read(self) -> None:
        """Reads what was written since the previous call.

        Raises:
            TraceError: The stream is damaged.
        """
        for batch in self._tail.batches():
            for name, instance, value in zip(
                batch["name"].to_pylist(),
                batch["instance"].to_pylist(),
                batch["value"].to_pylist(),
                strict=True,
            ):
                if instance is None:
                    self.last[name] = value

    def close(self) -> None:
        """Closes the stream."""
        self._tail.close()
