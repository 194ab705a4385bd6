"""Records messages at ``c10d`` operators, which every collective, send and receive calls.

`torch.distributed`, DDP's reducer in C++, FSDP, DTensor and functional collectives all call these
operators. A kernel at the ``BackendSelect`` key sees each call once, on the calling thread, right
before the backend. Unlike the autograd key, ``BackendSelect`` is also used under
``inference_mode`` and ``no_grad``. Tracing and compiling stop above it; tensors without storage
reach it and are not recorded.

A kernel in Python costs more than the recording itself, so plain launches by Python on the CPU
bypass these kernels; see `python_launches.py`.

The end of a message comes from the cheapest available source: Gloo's threads if `gloo_times.py`
is active; otherwise the ``wait`` of a blocking call, or a reaper for an asynchronous call. The end
of a send or receive comes from the job's own ``wait``, because Gloo runs the operation inside of
it and a second waiter would interfere. The same holds for a reduce-scatter, which Gloo implements
with other collectives: each wait for it writes its output, which the job may have changed since
its own wait.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.c10d import (
    custom_communication,
    functional,
    python_groups,
    python_launches,
)
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS
from ddltrace.tracer.interpose.c10d.observer import Observer
from ddltrace.tracer.interpose.c10d.python_kernels import PythonKernels
from ddltrace.tracer.native.layout import CONTROL
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.waits import Waits
    from ddltrace.tracer.interpose.patch_context import PatchContext


_OFF: Final = CONTROL["off"]


def install(context: PatchContext) -> Waits:
    """Registers the kernels and patches the wait methods.

    Args:
        context: The parts of the recording rank.

    Returns:
        The recorder of the host's waits.
    """
    import torch

    observer = Observer(context)
    kernels = PythonKernels(context, "c10d")
    for name, operator in OPERATORS.items():
        if hasattr(torch.ops.c10d, name):
            is_collective = operator.op not in P2P_OPS
            kernels.add(name, observer.kernel(name, operator), is_collective=is_collective)
    offering = python_launches.install(context, observer)
    python_groups.install(context, observer)
    context.on_close(observer.stop)

    def switch(on: bool) -> None:
        observer.switch(on)
        if context.native is not None:
            context.native.control[_OFF] = not on

    switch(not context.recorder.off)
    context.on_switch.append(switch)
    os.register_at_fork(after_in_child=quiet(observer.abandon, context.fault))
    functional.install(context, observer, offering)
    custom_communication.install(context, observer)
    context.graphs.patch(torch.cuda.CUDAGraph, context.patches)
    return observer.waits
