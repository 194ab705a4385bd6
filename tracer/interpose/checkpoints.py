"""Records the saving and loading of checkpoints as markers, one for each call of the job.

`torch.save` and `torch.load` are seen where they open their file: a script may have imported the
functions by name before, and no function of the tracer stands between them and the script, to which
their warnings point.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.import_hooks import after_import
from ddltrace.tracer.record.recorder import PHASE_CODE
from ddltrace.tracer.trace.schema import (
    CHECKPOINT_FILE,
    CHECKPOINT_LOAD,
    CHECKPOINT_SAVE,
    CHECKPOINT_SAVE_ASYNC,
    CHECKPOINT_WRITE,
)

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_SERIALIZATION: Final = "torch.serialization"
_DISTRIBUTED: Final = "torch.distributed.checkpoint"
_MOST_NAMES: Final = 4096
"""Of checkpoints; each name is kept until the process ends."""

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Patches what opens the files of checkpoints, and distributed checkpoints once imported.

    Args:
        context: The parts of the recording rank.
    """
    import torch

    marks, module = _Marks(context), torch.serialization
    for name in ("_open_zipfile_writer", "_open_file_like"):
        context.patches.put(module, name, _opening(marks, getattr(module, name)))
    context.record.info.checkpoints = True

    def patch_distributed(module: Any) -> None:
        for name, call in (("save", _save), ("load", _load), ("async_save", _async_save)):
            context.patches.put(module, name, call(marks, getattr(module, name)))

    after_import(_DISTRIBUTED, quiet(patch_distributed, context.fault))


class _Marks:
    """Records markers.

    Attributes:
        add: As `_add`, without errors.
        fault: Notes a failure inside the tracer.
    """

    def __init__(self, context: PatchContext) -> None:
        self._context = context
        self._names: set[str] = set()
        self.fault = context.fault
        self.add = quiet(self._add, context.fault)

    @property
    def loads_data(self) -> bool:
        """Whether the job fetches a batch."""
        return self._context.recorder.phase == PHASE_CODE["data"]

    def _add(self, what: str, start: int, place: Any) -> None:
        """Adds a marker that ends now.

        Args:
            what: What was done.
            start: Since when.
            place: A path or an open file in which the checkpoint is; None if there is none.
        """
        end, recorder = _now(), self._context.recorder
        if recorder.paused:
            return
        self._context.steps.end_checkpoint()
        name = what + _identity(place)
        if name not in self._names:
            if len(self._names) >= _MOST_NAMES:
                name = what
            self._names.add(name)
        recorder.add(recorder.site("marker", name), start, end, threading.get_ident())


def _identity(place: Any) -> str:
    """The part of a marker's name that identifies a file or folder, also when it is renamed."""
    try:
        status = os.stat(place.fileno() if hasattr(place, "fileno") else place)
    except (OSError, ValueError, TypeError):  # a buffer in memory, or in a store
        return ""
    return f"{CHECKPOINT_FILE}{status.st_dev}:{status.st_ino}"


class _Opened:
    """The context in which `torch.save` or `torch.load` has its file open."""

    def __init__(self, opener: Any, end: Callable[[bool], object]) -> None:
        self._opener = opener
        self._end = end

    def __enter__(self) -> Any:
        return self._opener.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        succeeded = False
        try:
            result = self._opener.__exit__(kind, error, traceback)
            succeeded = kind is None
            return result
        finally:
            self._end(succeeded)


def _opening(marks: _Marks, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of ``torch.serialization`` that opens a file."""

    @functools.wraps(original)
    def opening(name_or_buffer: Any, *mode: str) -> Any:
        start = _now()
        opener = original(name_or_buffer, *mode)
        what = CHECKPOINT_LOAD if "rb" in mode else CHECKPOINT_SAVE
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != _SERIALIZATION or _is_part(caller.f_back):
            return opener
        if what == CHECKPOINT_LOAD and marks.loads_data:
            return opener

        def end(succeeded: bool) -> None:
            marks.add(what, start, name_or_buffer if succeeded else None)

        return _Opened(opener, end)

    return opening


def _is_part(caller: Any) -> bool:
    """Whether a call is a part of a distributed checkpoint, which is recorded as a whole."""
    return caller is not None and str(caller.f_globals.get("__name__")).startswith(_DISTRIBUTED)


def _save(marks: _Marks, original: Callable[..., Any]) -> Callable[..., Any]:
    return _recorded(marks, original, CHECKPOINT_SAVE)


def _load(marks: _Marks, original: Callable[..., Any]) -> Callable[..., Any]:
    return _recorded(marks, original, CHECKPOINT_LOAD)


def _recorded(marks: _Marks, original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        start, place = _now(), None
        try:
            result = original(*args, **kwargs)
            place = _place(kwargs)
            return result
        finally:
            marks.add(what, start, place)

    return call


def _async_save(marks: _Marks, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``async_save``: training waits for the call only, not for the checkpoint."""

    @functools.wraps(original)
    def async_save(*args: Any, **kwargs: Any) -> Any:
        start = _now()
        try:
            result = original(*args, **kwargs)
        finally:
            marks.add(CHECKPOINT_SAVE_ASYNC, start, None)

        def end(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                marks.add(CHECKPOINT_WRITE, start, _place(kwargs))

        watch(result, end)
        return result

    def call_at_end(result: Any, end: Callable[[Any], None]) -> None:
        future = getattr(result, "upload_completion", result)
        future.add_done_callback(quiet(end, marks.fault))

    watch = quiet(call_at_end, marks.fault)
    return async_save


def _place(arguments: dict[str, Any]) -> Any:
    """The folder of a distributed checkpoint; None if it is in no file system."""
    for name in ("storage_writer", "storage_reader"):
        if arguments.get(name) is not None:
            return getattr(arguments[name], "path", None)
    return arguments.get("checkpoint_id")
