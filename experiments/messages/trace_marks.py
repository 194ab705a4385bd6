"""Declares to the tracer the parameters of messages, waits and updates of the engine.

In a process that is not traced, these functions cost nearly nothing. They never raise.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from ddltrace.tracer.codec_events import record_codec

if TYPE_CHECKING:
    import torch


CALIBRATION: Final = "calibration: "
"""Begin of the names of messages by which a strategy measures, searches, or agrees on what it
found, and of the marks of when that begins and ends."""
CALIBRATION_BEGINS: Final = f"{CALIBRATION}begins"
CALIBRATION_ENDS: Final = f"{CALIBRATION}ends"


def current_session() -> Any:
    """The `Session` of this process, if it is a recording rank; else None.

    It has no type here: who reads descriptions of techniques does not depend on the capture.
    """
    module = sys.modules.get("ddltrace.tracer.capture.session")
    return None if module is None else module.current_session()


@contextlib.contextmanager
def carrying(name: str | None, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Declares the parameters of the messages that this thread launches inside.

    Args:
        name: The messages' name in the trace; None names them after the parameters.
        parameters: The parameters whose gradients travel.
    """
    session = current_session()
    if session is None:
        yield
        return
    ids = [session.registry.tensor_id(parameter) for parameter in parameters]
    with session.context.carrying(name, ids):
        yield


def name_like(stand_in: torch.Tensor, parameter: torch.Tensor) -> None:
    """Gives a tensor that `carrying` gets in place of a parameter the parameter's name."""
    session = current_session()
    if session is not None:
        session.registry.name_like(stand_in, parameter)


def calibrating(what: str) -> contextlib.AbstractContextManager[None]:
    """Declares that the messages launched inside calibrate or search.

    Args:
        what: What is measured or agreed on.
    """
    return carrying(CALIBRATION + what, ())


@contextlib.contextmanager
def carrying_part(name: str, positions: Sequence[int]) -> Iterator[None]:
    """Declares that the messages launched inside carry a part of the parameters of `carrying`.

    Args:
        name: The messages' name in the trace.
        positions: Places of the parameters among those of `carrying`.
    """
    session = current_session()
    carried = None if session is None else session.registry.carried.now
    if session is None or carried is None:
        yield
        return
    ids = carried[1]
    part = [ids[position] for position in positions] if ids is not None else [None]
    with session.context.carrying(name, part):
        yield


@contextlib.contextmanager
def region(kind: str, name: str) -> Iterator[None]:
    """Records the enclosed code as one event.

    Args:
        kind: A kind of the trace's schema, such as ``wait`` or ``codec``.
        name: What the timeline shows.
    """
    session = current_session()
    start = time.monotonic_ns()
    try:
        yield
    finally:
        if session is not None and not session.recorder.paused:
            session.recorder.record(kind, name, start, time.monotonic_ns())


@contextlib.contextmanager
def optimizer_phase() -> Iterator[None]:
    """Records the enclosed code as part of the step's optimizer phase."""
    from ddltrace.tracer.record.recorder import PHASE_CODE

    session = current_session()
    if session is None:
        yield
        return
    start = time.monotonic_ns()
    session.recorder.enter_phase(PHASE_CODE["optimizer"], start)
    try:
        yield
    finally:
        end = time.monotonic_ns()
        session.recorder.leave_phase(end)
        if not session.recorder.paused:
            session.recorder.record("phase", "optimizer", start, end)


def mark(name: str, start_ns: int | None = None) -> None:
    """Records a marker that ends now, also in steps that the tracer does not record.

    Args:
        name: What the timeline shows.
        start_ns: When it began: ``time.monotonic_ns()``; None for an instant.
    """
    session = current_session()
    if session is not None:
        now = time.monotonic_ns()
        session.recorder.record("marker", name, now if start_ns is None else start_ns, now)


class Coding:
    """Times an encoding or decoding as an event of the trace.

    Use::

        with Coding("encode", bytes_in=tensor.nbytes) as coding:
            coding.bytes_out = ...
    """

    def __init__(self, direction: Literal["encode", "decode"], bytes_in: int) -> None:
        self._direction: Literal["encode", "decode"] = direction
        self._bytes_in = bytes_in
        self.bytes_out = 0

    def __enter__(self) -> Coding:
        self._start_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            record_codec(self._direction, self._start_ns, self._bytes_in, self.bytes_out)
