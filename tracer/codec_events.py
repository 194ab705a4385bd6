"""Encodings and decodings of messages as events of the trace."""

from __future__ import annotations

import sys
import threading
import time
from typing import Literal


def record_codec(
    direction: Literal["encode", "decode"], start_ns: int, bytes_in: int, bytes_out: int
) -> None:
    """Records an encoding or decoding that has just ended; free when the job is not traced.

    Args:
        direction: Whether it was an encoding or a decoding.
        start_ns: When it began: ``time.monotonic_ns()``.
        bytes_in: Size of the input.
        bytes_out: Size of the output.
    """
    # A process that is not traced never loaded the session; looking it up costs a dict probe.
    session_module = sys.modules.get("ddltrace.tracer.capture.session")
    session = session_module.current_session() if session_module is not None else None
    if session is None or session.recorder.paused:
        return
    try:
        recorder = session.recorder
        site = recorder.site("codec", direction, size=bytes_in, out_size=bytes_out)
        recorder.add(site, start_ns, time.monotonic_ns(), threading.get_ident())
    except Exception as error:  # noqa: BLE001 - the job continues
        session.fault("codec", error)
