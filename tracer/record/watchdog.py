"""Records the activity of a rank that has recorded no events for some time.

Events are recorded when they end, so a rank that is stuck in the middle of something leaves
no event of it. The writer calls this module at every flush. After some time without events, it
stores the step, the phase and the Python stack of the thread that trains or communicates, once per
silence. A trace of a job that hangs then shows the activity of each rank, even after a kill.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.trace.schema import PHASES

if TYPE_CHECKING:
    from ddltrace.tracer.trace.run_info import Silence

_PATIENCE_S: Final = 2.0
_MAX_PATIENCE_S: Final = 64.0
_MAX_FRAMES: Final = 24
_MAX_FRAME_LENGTH: Final = 200
_COMMUNICATION: Final = "/torch/distributed/"
_OWN_FOLDER: Final = str(Path(__file__).resolve().parents[1])


class Watchdog:
    """Watches for silence; called by the writer, never by the job's threads.

    Long silences can be normal (a long forward pass at level ``comm``), so each silence that ends
    doubles the time until the next one is recorded.

    Args:
        recorder: Provides the current step and phase.
        publish: Called with each record.
        trainer: Returns the training thread; None if it is not known.
    """

    def __init__(
        self,
        recorder: Recorder,
        publish: Callable[[Silence], None],
        trainer: Callable[[], int | None],
    ) -> None:
        self._recorder = recorder
        self._publish = publish
        self._trainer = trainer
        self._patience_s = _PATIENCE_S
        self._active_ns = time.monotonic_ns()
        self._noted = False

    def tick(self, *, active: bool) -> None:
        """Checks the rank.

        Args:
            active: Whether the rank has recorded an event since the last call.
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
                    "stack": stack_of_job(self._trainer()),
                }
            )


def stack_of_job(trainer: int | None) -> list[str]:
    """The stack of the job: frames of one thread as ``file:line function``, the innermost first.

    Candidates are the training thread and the main thread, and all other threads if no thread is
    known to train. The first candidate inside ``torch.distributed`` is chosen, else the first one.
    Frames of the tracer are left out, and the number of frames is limited.

    Args:
        trainer: The training thread; None if it is not known.
    """
    frames = sys._current_frames()
    trains = trainer in frames
    threads = [trainer, threading.main_thread().ident, *(() if trains else frames)]
    alive = [frames[thread] for thread in threads if thread in frames]
    shown: list[str] = []
    for frame in _outwards(next(filter(_communicates, alive), alive[0])):
        code = frame.f_code
        if len(shown) < _MAX_FRAMES and not code.co_filename.startswith(_OWN_FOLDER):
            text = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
            shown.append(text[-_MAX_FRAME_LENGTH:])
    return shown


def _communicates(innermost: FrameType) -> bool:
    """Whether a thread is inside of ``torch.distributed``."""
    return any(_COMMUNICATION in frame.f_code.co_filename for frame in _outwards(innermost))


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back
