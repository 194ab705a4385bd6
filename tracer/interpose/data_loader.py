"""Records the fetching of batches from ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.record.recorder import PHASE_CODE

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Patches the iterators' common ``__next__``.

    Args:
        context: The parts of the recording rank.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    recorder, steps = context.recorder, context.steps
    site = recorder.site("data", "next batch")
    iterator_class: Any = _BaseDataLoaderIter
    original = iterator_class.__next__

    def begin(start: int) -> None:
        recorder.enter_phase(PHASE_CODE["data"], start)

    def end(start: int, end_ns: int, *, fetched: bool) -> None:
        recorder.leave_phase(end_ns)
        if not fetched:
            return  # the end of an epoch fetches nothing
        steps.begin_data(start)
        if recorder.paused:
            return
        recorder.add(site, start, end_ns, threading.get_ident())

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        start = _now()
        try:
            begin(start)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("begin data", error)
        fetched = False
        try:
            batch = original(self)
            fetched = True
            return batch
        finally:
            try:
                end(start, _now(), fetched=fetched)
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("end data", error)

    context.patches.put(iterator_class, "__next__", __next__)
