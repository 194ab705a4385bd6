"""``ddltrace.annotate``: a region of the job, named by its author."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.capture.session import Session


def annotate(name: str) -> AbstractContextManager[None]:
    """A context manager that records the region if this process is traced.

    Args:
        name: What the timeline shows for the region.
    """
    # A process that is not traced never loaded the session; looking it up costs a dict probe.
    session_module = sys.modules.get("ddltrace.tracer.capture.session")
    session = session_module.current_session() if session_module is not None else None
    return nullcontext() if session is None else _region(session, name)


@contextmanager
def _region(session: Session, name: str) -> Iterator[None]:
    start = time.monotonic_ns()
    try:
        yield
    finally:
        try:
            session.recorder.record("marker", str(name), start, time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - the job goes on
            session.fault("annotate", error)
