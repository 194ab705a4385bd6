"""Records Python's garbage collections that take a millisecond or longer, as markers.

A collection stops all Python code of the process, at a time that differs from rank to rank.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.trace.schema import GARBAGE_COLLECTION

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_LEAST_NS: Final = 1_000_000

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Adds a callback of the collector, which is taken out while nothing is recorded.

    Args:
        context: The parts of the recording rank.
    """
    recorder = context.recorder
    site = recorder.site("marker", GARBAGE_COLLECTION)
    start = 0

    # A collection may begin wherever Python allocates, also in the recorder: `add` takes no lock.
    def collect(phase: str, info: dict[str, Any]) -> None:
        nonlocal start
        now = _now()
        if phase == "start":
            start = now
        elif start and now - start >= _LEAST_NS and not recorder.paused:
            recorder.add(site, start, now, threading.get_ident())

    callback = quiet(collect, context.fault)

    def switch(on: bool) -> None:
        nonlocal start
        start = 0
        if on:
            gc.callbacks.append(callback)
        elif callback in gc.callbacks:
            gc.callbacks.remove(callback)

    switch(not recorder.off)
    context.on_switch.append(switch)
    context.on_close(lambda _: switch(False))
    context.record.info.collections = True
