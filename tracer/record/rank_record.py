"""The trace's record of this process, kept up to date while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.trace.json_files import release_space, reserve_space
from ddltrace.tracer.trace.run_files import write_sidecar
from ddltrace.tracer.trace.trace_files import SIDECAR_SUFFIX

if TYPE_CHECKING:
    from ddltrace.tracer.record.recorder import Recorder
    from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, Silence, TensorInfo, Window

_MAX_FAULTS: Final = 20
_MAX_WINDOWS: Final = 1000
_TELL_DROPPED_S: Final = 1.0


class RankRecord:
    """Collects the metadata of this process; the writer's thread saves it.

    A disk that does not respond must not block the job, so only `open`, `save_changes` and `finish`
    write.

    Args:
        info: The record.
        directory: The trace directory.
        tensors: The parameters known so far; it grows.
        recorder: Counts dropped events.
    """

    def __init__(
        self, info: RankInfo, directory: Path, tensors: Sequence[TensorInfo], recorder: Recorder
    ) -> None:
        self.info = info
        self._directory = directory
        self._tensors = tensors
        self._recorder = recorder
        self._changed = False
        self._is_unsaved = False  # the disk takes nothing
        self._told_dropped_s = 0.0

    @property
    def _path(self) -> Path:
        return self._directory / (self.info.segment + SIDECAR_SUFFIX)

    def open(self) -> None:
        """Writes the first version.

        Raises:
            OSError: It cannot be written.
        """
        write_sidecar(self._directory, self.info)
        reserve_space(self._path)

    def save(self) -> None:
        """Requests that the writer saves the record at its next write."""
        self._changed = True

    def add_group(self, group: GroupInfo) -> None:
        """Notes a process group, in place of what was known of it."""
        # A new list, because the writer's thread may read the former one now.
        others = [known for known in self.info.groups if known.name != group.name]
        self.info.groups = [*others, group]
        self.save()

    def note_device(self) -> None:
        """Notes that the job computes on a CUDA device."""
        self.info.device = "cuda"
        self.save()

    def note_flushed(self) -> None:
        """Notes that the process has left its process groups, and that all events are written."""
        self.info.flushed = True
        self.save()

    def note_silence(self, silence: Silence) -> None:
        """Stores the activity of this rank during a silence."""
        self.info.silence = silence
        self.save()

    def begin_window(self, step: int, level: str, reason: str) -> None:
        """Notes that recording was switched on, or its level was changed."""
        window: Window = {"first": step, "stop": None, "level": level}
        if reason:
            window["reason"] = reason
        self.info.windows = [*self.info.windows[-_MAX_WINDOWS:], window]
        self.save()

    def end_window(self, step: int) -> None:
        """Notes the first step that is not recorded, or is at another level."""
        first: Window = {"first": 0, "stop": None, "level": self.info.level}
        former = self.info.windows or [first]
        self.info.windows = [*former[:-1], {**former[-1], "stop": step}]
        self.save()

    def note(self, text: str) -> None:
        """Adds one line about a failure inside the tracer, up to a maximum number of lines."""
        if len(self.info.errors) < _MAX_FAULTS:
            self.info.errors.append(text)

    def fault(self, where: str, error: Exception) -> None:
        """Notes a failure inside the tracer; the job never sees it."""
        if len(self.info.errors) >= _MAX_FAULTS:
            return
        with contextlib.suppress(Exception):
            self.note(f"{where}: {type(error).__name__}: {str(error)[:200]}")
            self.save()

    def save_changes(self, *, active: bool) -> None:
        """On the writer's thread: saves changes and the number of dropped events.

        Args:
            active: Whether there are events to write.
        """
        if active and self.info.flushed:
            self.info.flushed = False
            self._changed = True
        now_s = time.monotonic()
        # A killed rank could not report it later.
        has_changed = self._recorder.dropped != self.info.dropped and (
            now_s > self._told_dropped_s + _TELL_DROPPED_S
        )
        if not (self._changed or has_changed or self._is_unsaved):
            return
        self._changed = False
        self._told_dropped_s = now_s
        self._write()

    def finish(self, rows: int) -> None:
        """Saves the last version, after the last write.

        Args:
            rows: Number of written events.
        """
        self.info.events = rows
        self._changed = True
        while self._changed:
            self._changed = False
            self._write()
        release_space(self._path)

    def _write(self) -> None:
        self.info.tensors = list(self._tensors)
        self.info.dropped = self._recorder.dropped
        try:
            write_sidecar(self._directory, self.info)
            self._is_unsaved = False
        except OSError as error:
            if not self._is_unsaved:
                self._is_unsaved = True
                self.note(f"save_info: {error!r:.200}")
        except RuntimeError:  # another thread has just changed it
            self._changed = True
