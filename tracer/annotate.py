"""``ddltrace.annotate``: a region that the training script names."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.capture.session import Session


def annotate(name: str) -> AbstractContextManager[None]:
    """Records a region if this process is traced.

    Args:
        name: The region's label in the timeline.

    Returns:
        A context manager that encloses the region.
    """
    # An untraced process has not imported the session: the lookup costs one dictionary probe.
    session_module = sys.modules.get("ddltrace.tracer.capture.session")
    session = session_module.current_session() if session_module is not None else None
    if session is None or session.recorder.off:
        return nullcontext()
    return _region(session, name)


@contextmanager
def _region(session: Session, name: str) -> Iterator[None]:
    start = time.monotonic_ns()
    try:
        yield
    finally:
        try:
            session.recorder.record("marker", str(name), start, time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - the job continues
            session.fault("annotate", error)
