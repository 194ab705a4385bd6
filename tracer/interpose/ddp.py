"""Patches DistributedDataParallel: its constructor, communication hooks and waits in C++."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.interpose.autograd import watch_gradients
from ddltrace.tracer.trace.schema import BUCKET

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Patches DDP's constructor and the broadcast that it waits for in C++.

    Args:
        context: The parts of the recording rank.
    """
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    dist: Any = torch.distributed
    ddp_class: Any = DistributedDataParallel
    ddp_class.__init__ = _registering(context, dist, ddp_class.__init__)
    # Copied or unpickled wrappers build their reducer here.
    ddp_class.__setstate__ = _registering(context, dist, ddp_class.__setstate__)
    context.patches.put(dist, "_broadcast_coalesced", _waited(context, dist._broadcast_coalesced))
    dist._register_comm_hook = _observed(context, dist._register_comm_hook)


def _registering(
    context: PatchContext, dist: Any, original: Callable[..., None]
) -> Callable[..., None]:
    """Wraps a method that builds a reducer, and registers the wrapped model after it."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with _InitialBuckets(dist) as initial:
            original(self, *args, **kwargs)
        try:
            _register(context, self, initial)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("DDP", error)

    return build


def _register(context: PatchContext, ddp: Any, initial: _InitialBuckets) -> None:
    watch_gradients(context, context.registry.add_model(ddp))
    context.ddp.add(ddp, initial.indices)
    if context.registry.changed:
        context.save_info()


def note_wrapped(context: PatchContext, module: Any) -> None:
    """Registers a model that was wrapped before the tracer was installed.

    Args:
        context: The parts of the recording rank.
        module: A module whose parameters are registered.
    """
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel) and not context.ddp.knows(module):
        # Only its reducer knows the buckets, and it tells only those that it has rebuilt.
        context.ddp.add(module, None)


def _observed(context: PatchContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Attributes the messages of a user's communication hook to the hook's bucket."""
    registry = context.registry

    @functools.wraps(original)
    def register_comm_hook(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
        # The reducer keeps what it calls. A partial object is no Python function, and what it calls
        # can be changed: while nothing is recorded, the job's hook alone.
        called: Any = functools.partial(hook)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            name = "bucket"
            ids: list[int | None] = [None]
            try:
                context.backward.bucket_messages += 1
                name = f"{BUCKET}{bucket.index()}"
                ids = [registry.tensor_id(p) for p in bucket.parameters()]
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("communication hook", error)
            with context.carrying(name, ids):
                return hook(state, bucket)

        def switch(on: bool) -> None:
            called.__setstate__((observed if on else hook, (), {}, None))

        switch(not context.recorder.off)
        context.on_switch.append(switch)
        return original(reducer, state, called)

    return register_comm_hook


def _waited(context: PatchContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Records the host's wait in a function that blocks in C++ until its messages are done."""
    here = context.registry.carried
    site = context.recorder.site("wait", "broadcast_coalesced")

    def begin() -> None:
        try:
            # It copies its tensors into a buffer: no parameter lies at the buffer's address.
            # Inlined from `context.carrying`, which would cost more than the rest.
            here.now = (None, None)
            if context.known is not None:
                context.known.begin_broadcasts()
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("broadcast_coalesced", error)

    def end(start: int, end_ns: int, carried: Any) -> None:
        try:
            here.now = carried
            if context.known is not None:
                context.known.end_broadcasts(end_ns)
            if not context.recorder.paused:
                context.recorder.add(site, start, end_ns, threading.get_ident())
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("broadcast_coalesced", error)

    @functools.wraps(original)
    def broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
        start, carried = _now(), here.now
        begin()
        try:
            return original(*args, **kwargs)
        finally:
            end(start, _now(), carried)

    return broadcast_coalesced


class _InitialBuckets:
    """Captures the bucket assignment that DDP's constructor computes."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self.indices: list[list[int]] | None = None

    def __enter__(self) -> _InitialBuckets:
        self._original = self._dist._compute_bucket_assignment_by_size

        @functools.wraps(self._original)
        def compute(*args: Any, **kwargs: Any) -> Any:
            result = self._original(*args, **kwargs)
            # The reducer receives them reversed: gradients of the last layers come first.
            with contextlib.suppress(Exception):
                self.indices = [list(bucket) for bucket in reversed(result[0])]
            return result

        self._dist._compute_bucket_assignment_by_size = compute
        return self

    def __exit__(self, *_: object) -> None:
        self._dist._compute_bucket_assignment_by_size = self._original
