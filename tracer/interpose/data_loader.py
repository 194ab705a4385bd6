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
_NOTHING = object()


def install(context: PatchContext) -> None:
    """Patches the iterators' common ``__next__``.

    Args:
        context: The parts of the recording rank.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ddltrace.tracer.interpose.batch_sizes import size_of_batch

    recorder, steps = context.recorder, context.steps
    iterator_class: Any = _BaseDataLoaderIter
    original = iterator_class.__next__

    def begin(start: int) -> None:
        recorder.enter_phase(PHASE_CODE["data"], start)

    def end(iterator: Any, start: int, end_ns: int, batch: Any) -> None:
        recorder.leave_phase(end_ns)
        if batch is _NOTHING:
            return  # the end of an epoch fetches nothing
        steps.begin_data(start)
        if recorder.paused:
            return
        samples = tokens = -1
        if iterator._auto_collation:  # else the loader passes on what it is given: a sample, maybe
            samples, tokens = size_of_batch(batch)
        site = recorder.site("data", "next batch", samples=samples, tokens=tokens)
        recorder.add(site, start, end_ns, threading.get_ident())

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        start = _now()
        try:
            begin(start)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("begin data", error)
        batch: Any = _NOTHING
        try:
            batch = original(self)
            return batch
        finally:
            try:
                end(self, start, _now(), batch)
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("end data", error)

    context.patches.put(iterator_class, "__next__", __next__)
