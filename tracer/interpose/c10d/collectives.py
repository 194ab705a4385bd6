"""Every collective, send and receive: the ``c10d`` operators of PyTorch's dispatcher.

Whoever communicates (``torch.distributed``, DDP's reducer in C++, FSDP, DTensor, functional
collectives) goes through one of these operators. A kernel at the ``BackendSelect`` key sees
each call once, on the thread that makes it, just before the backend does. Unlike the autograd
key, ``BackendSelect`` is also passed under ``inference_mode`` and ``no_grad``. Tracing stops above
it; tensors that only have a shape come to it, and are passed over.

The kernels are Python's, and each costs more than all that it records. So what Python launches on
the CPU goes past them, if it is plain; see `launches.py`.

Completion is learned where it is cheapest: from Gloo's own threads, where that can be had; else
a blocking call's from its own ``wait``, an asynchronous collective's from a reaper. A send's or
receive's comes from the ``wait`` of its user (Gloo runs it nowhere else, and a second waiter
would disturb the first); so does a reduce-scatter's, which Gloo makes of other collectives: each
wait for it writes its output, which the job may have changed since its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.c10d import functional, launches, python_groups
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS
from ddltrace.tracer.interpose.c10d.observer import Observer

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.waits import Waits
    from ddltrace.tracer.interpose.patch_context import PatchContext


def install(context: PatchContext) -> Waits:
    """Registers the kernels and patches what is waited on.

    Args:
        context: The parts of the recording rank.

    Returns:
        What records the host's waits.
    """
    import torch

    observer = Observer(context)
    # Never destroyed: taking kernels out at exit, with messages in flight, would be a risk.
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    context.keep_alive(library)
    for name, operator in OPERATORS.items():
        if hasattr(torch.ops.c10d, name):
            library.impl(name, observer.kernel(name, operator), "BackendSelect", with_keyset=True)
    offering = launches.install(context, observer)
    python_groups.install(context, observer)
    context.on_close(observer.stop)
    os.register_at_fork(after_in_child=quiet(observer.abandon, context.fault))
    functional.install(context, observer, offering)
    return observer.waits
