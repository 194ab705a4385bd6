"""Notes what a rank is doing when it has recorded nothing for a while.

Events are recorded when they end, so a rank that is stuck in the middle of something leaves
no event of it. The writer asks this module at every flush; after some silence it takes down
the step, the phase and the main thread's Python stack, once, so that a trace of a job that
hangs says what each rank was doing, even after a kill.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ddltrace.tracer.recorder import Recorder
from ddltrace.tracer.schema import PHASES

_PATIENCE_S: Final = 2.0
_MAX_PATIENCE_S: Final = 64.0
_MAX_FRAMES: Final = 24
_MAX_FRAME_LENGTH: Final = 200
_OWN_FOLDER: Final = str(Path(__file__).resolve().parent)


class Watchdog:
    """Watches for silence; called by the writer, never by the job's threads.

    A job may be silent by nature (a long forward pass at level ``comm``): each silence that
    ends doubles the patience, so that the notes cost nothing in the long run.

    Args:
        recorder: Whose step and phase to take down.
        publish: Is given each note; see ``silence`` in ``docs/trace-format.md``.
    """

    def __init__(self, recorder: Recorder, publish: Callable[[dict[str, Any]], None]) -> None:
        self._recorder = recorder
        self._publish = publish
        self._patience_s = _PATIENCE_S
        self._active_ns = time.monotonic_ns()
        self._noted = False

    def tick(self, *, active: bool) -> None:
        """Looks at the rank.

        Args:
            active: Whether it has recorded anything since the last call.
        """
        now = time.monotonic_ns()
        if active:
            if self._noted:
                self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE_S)
            self._noted = False
            self._active_ns = now
        elif not self._noted and now - self._active_ns >= self._patience_s * 1e9:
            self._noted = True
            self._publish(
                {
                    "since_ns": self._active_ns,
                    "noticed_ns": now,
                    "step": self._recorder.step,
                    "phase": PHASES[self._recorder.phase],
                    "stack": main_thread_stack(),
                }
            )


def main_thread_stack() -> list[str]:
    """The main thread's frames as ``file:line function``, the innermost first.

    The tracer's own frames are left out, and only so many are taken as tell where it is.
    """
    ident = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    shown: list[str] = []
    while frame is not None and len(shown) < _MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDER):
            text = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
            shown.append(text[-_MAX_FRAME_LENGTH:])
        frame = frame.f_back
    return shown
