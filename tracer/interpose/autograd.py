"""Backward passes and the readiness of gradients.

``register_post_accumulate_grad_hook`` tells when a parameter's gradient is ready without
touching the graph; full backward hooks would insert functions into it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.capture.fault_barrier import quiet
from ddltrace.tracer.naming.gradient_ready_times import NativeGradients
from ddltrace.tracer.record.recorder import BUCKET, PHASE_CODE

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.capture.session import Session
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.timing.device_clock import Mark

_now = time.monotonic_ns


class Backward:
    """What is known of the backward pass that runs.

    Attributes:
        depth: How many engine calls are nested; checkpointing calls backward in backward.
        started: Number of outermost backward passes so far.
        last_gradient_ns: When the newest gradient became ready, of those that Python has seen.
        bucket_messages: Messages that DDP's reducer launched in this pass and waits for at
            its end, of those that Python recorded.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.started = 0
        self.last_gradient_ns = 0
        self.bucket_messages = 0
        self.device_mark: Mark | None = None


def install(session: Session) -> None:
    """Patches ``torch.autograd.backward`` and ``torch.autograd.grad``.

    Args:
        session: The recording rank.
    """
    import torch

    note_pass = quiet(session.registry.access.note_pass, session.fault)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _timed(session, getattr(torch.autograd, name), note_pass))
    if session.native is not None:
        _watch_without_python(session, session.native)


def _watch_without_python(session: Session, library: NativeLibrary) -> None:
    """Has C++ take down when gradients become ready, where a parameter has no hook of the job's."""
    import torch

    gradients = session.registry.native = NativeGradients(
        library, session.recorder, session.registry, detailed=session.config.level != "comm"
    )
    session.recorder.collectors.append(gradients.collect)
    os.register_at_fork(after_in_child=quiet(gradients.abandon, session.fault))
    tensor_class: Any = torch.Tensor
    original = tensor_class.register_post_accumulate_grad_hook

    @functools.wraps(original)
    def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Any) -> Any:
        try:
            for tensor in gradients.forget(self):
                _watch_with_python(session, tensor, self)
        except Exception as error:  # noqa: BLE001 - the job goes on
            session.fault("gradient hook", error)
        return original(self, hook)

    tensor_class.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook


def _begin_gradients(session: Session) -> None:
    """A backward pass begins: what became ready until now is not of it."""
    registry = session.registry
    registry.begin_backward()
    session.backward.last_gradient_ns = 0
    if registry.frozen:
        watch_gradients(session, registry.thawed())
    if registry.native is not None and session.device is not None:
        for leaf in registry.native.moved():
            for tensor in registry.native.forget(leaf):
                _watch_with_python(session, tensor, leaf)


def _timed(
    session: Session, original: Callable[..., Any], note_pass: Callable[[], None]
) -> Callable[..., Any]:
    recorder, state = session.recorder, session.backward
    site, wait_site = recorder.site("phase", "backward"), recorder.site("wait", "backward")
    detailed = session.config.level != "comm"

    def begin(start: int) -> None:
        state.started += 1
        state.bucket_messages = 0
        _begin_gradients(session)
        if session.ddp is not None:
            session.ddp.begin_backward()
        if session.known is not None:
            session.known.begin_backward()
        session.steps.begin_training(start)
        recorder.enter_phase(PHASE_CODE["backward"], start)
        state.device_mark = None
        if detailed and session.device is not None and not recorder.paused:
            state.device_mark = session.device.mark()

    def end(start: int, end_ns: int) -> None:
        known = 0 if session.known is None else session.known.end_backward(end_ns)
        recorder.leave_phase(end_ns)
        if state.bucket_messages and session.device is None:
            # The reducer has waited for its buckets; a reaper that was kept from running would
            # only learn of it later.
            for message in list(recorder.open.values()):
                if message.enqueue_ns >= start and message.name.startswith(BUCKET):
                    recorder.complete(message, end_ns)
        if state.device_mark is not None and session.device is not None:
            session.device.forget(state.device_mark)
            state.device_mark = None
        if recorder.paused:
            return
        recorder.add(site, start, end_ns, threading.get_ident())
        if known or state.bucket_messages:
            last_ns, native = state.last_gradient_ns, session.registry.native
            if native is not None:
                last_ns = max(last_ns, native.newest_ns)
            if last_ns:
                recorder.add(wait_site, last_ns, end_ns, threading.get_ident())

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        note_pass()
        if state.depth:
            return original(*args, **kwargs)
        state.depth = 1
        start = _now()
        try:
            begin(start)
        except Exception as error:  # noqa: BLE001 - the job goes on
            session.fault("begin backward", error)
        try:
            return original(*args, **kwargs)
        finally:
            state.depth = 0
            try:
                end(start, _now())
            except Exception as error:  # noqa: BLE001 - the job goes on
                session.fault("end backward", error)

    return backward


def _time_on_device(session: Session, gradient_site: int, device: torch.device) -> None:
    """Ends the device's work for one gradient and begins that for the next.

    The gradients of one device become ready on one thread; those of others are passed over.
    """
    timer, state, recorder = session.device, session.backward, session.recorder
    try:
        if timer is None or state.device_mark is None:
            return
        if device.type != "cuda" or device.index != timer.device:
            return
        _, name, tensor = recorder.sites[gradient_site]
        timer.interval(recorder.site("kernel", f"{name}.grad", tensor), state.device_mark)
        state.device_mark = timer.mark()
    except Exception as error:  # noqa: BLE001 - the job goes on
        state.device_mark = None
        session.fault("device gradient", error)


def watch_gradients(session: Session, parameters: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Records the instant at which each parameter's gradient has been accumulated.

    Args:
        session: The recording rank.
        parameters: Tensor ids and leaf parameters.
    """
    registry, gradients = session.registry, session.registry.native
    for tensor, parameter in parameters:
        if not parameter.requires_grad:
            registry.frozen[tensor] = weakref.ref(parameter)
            continue
        if not parameter.is_leaf or registry.is_shard(parameter):
            continue
        site = session.recorder.site("gradient", registry.tensors[tensor].name, tensor)
        if gradients is None or not gradients.watch(tensor, parameter, site):
            _watch_with_python(session, tensor, parameter)


def watch_again(session: Session, tensor: int, parameter: torch.Tensor) -> None:
    """Records the gradients of a parameter whose contents were replaced, and with them its hooks.

    Args:
        session: The recording rank.
        tensor: The parameter's id.
        parameter: It.
    """
    kept: Any = parameter
    hooks = getattr(kept, "_post_accumulate_grad_hooks", None)
    if not hooks:
        watch_gradients(session, [(tensor, parameter)])
    elif all(getattr(hook, "__module__", None) == __name__ for hook in hooks.values()):
        kept._post_accumulate_grad_hooks = hooks  # PyTorch has kept the list, and calls none
    # Else those of the job would be called again, too, as they are not without us.


def _watch_with_python(session: Session, tensor: int, parameter: torch.Tensor) -> None:
    """Has a function of Python record when a parameter's gradient is ready."""
    recorder, registry, state = session.recorder, session.registry, session.backward
    flat, emit, ident = recorder.flat, recorder.emit, threading.get_ident
    detailed = session.config.level != "comm"
    site = recorder.site("gradient", registry.tensors[tensor].name, tensor)
    this = (tensor,)

    def hook(parameter: torch.Tensor) -> None:
        if recorder.paused:
            return
        now = _now()
        if detailed:
            if len(flat) <= recorder.limit:
                emit((site, now, now, ident()))
            else:
                recorder.dropped += 1
        registry.access.note_gradient()
        registry.collect_ready()  # what came before it
        state.last_gradient_ns = now
        registry.note_ready(this)
        if state.device_mark is not None:
            _time_on_device(session, site, parameter.device)

    handle: Any = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    # Before those of the job, which may send the gradient: then it is to be known whose it is.
    if registry.access.may_look():  # else the engine may be about to call them
        _put_first(parameter, handle.id)


def _put_first(parameter: torch.Tensor, key: int) -> None:
    """Has one of a parameter's hooks called before the others."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not isinstance(hooks, dict) or key not in hooks:
        return  # a subclass may keep them in its own way
    # The engine goes by the order of insertion, also where the dictionary has another.
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)
