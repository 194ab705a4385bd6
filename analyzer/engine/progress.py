"""Progress of tasks on stderr: one line that is written again, or in a log a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, TextIO

_QUIET_S: Final = 1.0
"""Tasks that are done sooner are not reported."""
_LOG_EVERY_S: Final = 10.0


class Progress:
    """Reports how many of some tasks are done, for the time of a `with` block.

    Args:
        doing: What the tasks do.
        total: How many there are.
        out: Where to write, by default stderr.
    """

    def __init__(self, doing: str, total: int, out: TextIO | None = None) -> None:
        self._doing, self._total = doing, total
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty()
        self._done = 0
        self._next = time.monotonic() + _QUIET_S
        self._width = 0

    def advance(self, tasks: int = 1) -> None:
        """Counts more tasks as done."""
        self._done += tasks
        now = time.monotonic()
        if now >= self._next and self._done < self._total:
            self._show("" if self._live else "\n")
            self._next = now + (_QUIET_S / 4 if self._live else _LOG_EVERY_S)

    def _show(self, end: str) -> None:
        text = f"ddltrace: {self._doing}: {self._done:,} of {self._total:,}"
        start = "\r" if self._live else ""
        self._width = len(text)
        self._out.write(f"{start}{text}{end}")
        self._out.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live and self._width:
            self._out.write(f"\r{' ' * self._width}\r")
            self._out.flush()
