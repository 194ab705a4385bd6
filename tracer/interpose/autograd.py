"""Records backward passes and the readiness of gradients.

``register_post_accumulate_grad_hook`` reports that a parameter's gradient is ready without changing
the autograd graph; full backward hooks would insert functions into it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.backward_pass import HookedParameter
from ddltrace.tracer.interpose.import_hooks import after_import
from ddltrace.tracer.record.recorder import PHASE_CODE
from ddltrace.tracer.timing.device_clock import DeviceTimer
from ddltrace.tracer.trace.schema import BUCKET

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.patch_context import PatchContext
    from ddltrace.tracer.naming.gradient_ready_times import NativeGradients

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Patches ``torch.autograd.backward`` and ``torch.autograd.grad``.

    Args:
        context: The parts of the recording rank.
    """
    import torch

    note_pass = quiet(context.registry.access.note_pass, context.fault)

    def patch(module: Any, name: str) -> None:
        original = getattr(module, name)
        replacement, while_off = _timed(context, original, note_pass), _counted(context, original)
        context.patches.put(module, name, replacement, while_off=while_off)

    for name in ("backward", "grad"):
        patch(torch.autograd, name)

    def time_distributed(module: Any) -> None:
        """Of jobs that use RPC."""
        patch(module, "backward")

    after_import("torch.distributed.autograd", quiet(time_distributed, context.fault))
    context.on_switch.append(functools.partial(_switch_hooks, context))
    if context.recorder.off:
        _switch_hooks(context, False)
    if context.registry.native is not None:
        _watch_without_python(context, context.registry.native)


def _counted(context: PatchContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that begins a backward pass: while nothing is recorded, steps count on."""
    steps = context.steps

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if steps.updated_ns is not None:
            try:
                steps.begin_unrecorded()
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("begin backward", error)
        return original(*args, **kwargs)

    return backward


def _watch_without_python(context: PatchContext, gradients: NativeGradients) -> None:
    """Lets C++ record when gradients become ready, for parameters without hooks of the job."""
    import torch

    context.recorder.collectors.append(gradients.collect)
    context.recorder.other_buffers.append(gradients.filled)
    os.register_at_fork(after_in_child=quiet(gradients.abandon, context.fault))
    tensor_class: Any = torch.Tensor
    original = tensor_class.register_post_accumulate_grad_hook

    @functools.wraps(original)
    def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Any) -> Any:
        try:
            for tensor in gradients.forget(self):
                _watch_with_python(context, tensor, self)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("gradient hook", error)
        return original(self, hook)

    tensor_class.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook


def _begin_gradients(context: PatchContext) -> None:
    """Starts a backward pass: gradients that became ready earlier do not belong to it."""
    registry = context.registry
    registry.begin_backward()
    context.backward.last_gradient_ns = 0
    if registry.frozen:
        watch_gradients(context, registry.unfrozen())
    # A device without the timer in C++.
    timed = context.recorder.detailed and isinstance(context.device.timer, DeviceTimer)
    if registry.native is not None and timed:
        for leaf in registry.native.moved():
            for tensor in registry.native.forget(leaf):
                _watch_with_python(context, tensor, leaf)


def _timed(
    context: PatchContext, original: Callable[..., Any], note_pass: Callable[[], None]
) -> Callable[..., Any]:
    recorder, state = context.recorder, context.backward
    site, wait_site = recorder.site("phase", "backward"), recorder.site("wait", "backward")

    def begin(start: int) -> None:
        state.started += 1
        state.bucket_messages = 0
        _begin_gradients(context)
        context.ddp.begin_backward()
        if context.known is not None:
            context.known.begin_backward()
        context.steps.begin_training(start)
        recorder.enter_phase(PHASE_CODE["backward"], start)
        timer = context.device.timer
        state.on_device = recorder.detailed and timer is not None and not recorder.paused
        if timer is not None and state.on_device:
            timer.begin_gradients()

    def end(start: int, end_ns: int) -> None:
        known = 0 if context.known is None else context.known.end_backward(end_ns)
        recorder.leave_phase(end_ns)
        if state.bucket_messages and context.device.timer is None:
            # The reducer has waited for its buckets. A reaper thread that did not get to run would
            # observe their end later.
            for message in list(recorder.open.values()):
                if message.enqueue_ns >= start and message.name.startswith(BUCKET):
                    recorder.complete(message, end_ns, "wait")
        if state.on_device and context.device.timer is not None:
            context.device.timer.end_gradients()
        state.on_device = False
        if recorder.paused:
            return
        recorder.add(site, start, end_ns, threading.get_ident())
        if known or state.bucket_messages:
            last_ns, native = state.last_gradient_ns, context.registry.native
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
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("begin backward", error)
        try:
            return original(*args, **kwargs)
        finally:
            state.depth = 0
            try:
                end(start, _now())
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("end backward", error)

    return backward


def _time_on_device(context: PatchContext, site: int, device: torch.device) -> None:
    """Ends the device's work for one gradient and starts that for the next."""
    timer, state = context.device.timer, context.backward
    try:
        if timer is not None and device.type == "cuda" and device.index == timer.device:
            timer.end_gradient(site)
    except Exception as error:  # noqa: BLE001 - the job continues
        state.on_device = False
        context.fault("device gradient", error)


def watch_gradients(context: PatchContext, parameters: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Records the instant at which each parameter's gradient has been accumulated.

    Args:
        context: The parts of the recording rank.
        parameters: Tensor ids and leaf parameters.
    """
    registry, gradients = context.registry, context.registry.native
    for tensor, parameter in parameters:
        if not parameter.requires_grad:
            registry.frozen[tensor] = weakref.ref(parameter)
            continue
        if not parameter.is_leaf or registry.is_shard(parameter):
            continue
        site, on_device = _sites(context, tensor, parameter)
        if gradients is None or not gradients.watch(tensor, parameter, site, on_device):
            _watch_with_python(context, tensor, parameter)


def _sites(context: PatchContext, tensor: int, parameter: torch.Tensor) -> tuple[int, int]:
    """The recording sites of a parameter's gradients and of the device's work for them.

    The second is -1 if that work is not timed.
    """
    import torch

    cuda: Any = torch.cuda
    name = context.registry.tensors[tensor].name
    site = context.recorder.site("gradient", name, tensor)
    # A job that uses a device may move the parameter there later.
    if not context.recorder.detailed or not (parameter.is_cuda or cuda.is_initialized()):
        return site, -1
    return site, context.recorder.site("kernel", f"{name}.grad", tensor)


def watch_again(context: PatchContext, tensor: int, parameter: torch.Tensor) -> None:
    """Records the gradients of a parameter whose contents, and so its hooks, were replaced.

    Args:
        context: The parts of the recording rank.
        tensor: The parameter's id.
    """
    kept: Any = parameter
    hooks = getattr(kept, "_post_accumulate_grad_hooks", None)
    if not hooks:
        watch_gradients(context, [(tensor, parameter)])
    elif all(getattr(hook, "__module__", None) == __name__ for hook in hooks.values()):
        kept._post_accumulate_grad_hooks = hooks  # PyTorch keeps the list but calls no hook in it
    # Otherwise the job's hooks would be called again, unlike in an untraced job.


def _watch_with_python(context: PatchContext, tensor: int, parameter: torch.Tensor) -> None:
    """Registers a Python hook that records when a parameter's gradient is ready."""
    recorder, registry, state = context.recorder, context.registry, context.backward
    flat, emit, ident = recorder.flat, recorder.emit, threading.get_ident
    site, on_device = _sites(context, tensor, parameter)
    this = (tensor,)

    def hook(parameter: torch.Tensor) -> None:
        if recorder.paused:
            return
        now = _now()
        if recorder.detailed:
            if len(flat) <= recorder.limit:
                emit((site, now, now, ident()))
            else:
                recorder.dropped += 1
        registry.access.note_gradient()
        registry.collect_ready()  # earlier gradients, recorded by C++
        state.last_gradient_ns = now
        registry.note_ready(this)
        if state.on_device:
            _time_on_device(context, on_device, parameter.device)

    hooked = state.hooked[tensor] = HookedParameter(hook)
    if not recorder.off:
        _hook(context, hooked, parameter)


def _hook(context: PatchContext, hooked: HookedParameter, parameter: torch.Tensor) -> None:
    """Registers the hook of a parameter."""
    register: Any = parameter.register_post_accumulate_grad_hook
    hooked.handle = handle = register(hooked.hook)
    # Before the job's hooks: one of them may send the gradient, whose parameter must be known then.
    if context.registry.access.may_read():  # otherwise the engine may be about to call the hooks
        _put_first(parameter, handle.id)


def _switch_hooks(context: PatchContext, on: bool) -> None:
    """Removes the hooks in Python while nothing is recorded; C++ notes nothing then."""
    state, native = context.backward, context.registry.native
    if native is not None and not on:
        native.pause()
    for tensor, hooked in list(state.hooked.items()):
        parameter = context.registry.parameter(tensor)
        if parameter is None:
            del state.hooked[tensor]
        elif on:
            _hook(context, hooked, parameter)
        elif hooked.handle is not None:
            hooked.handle.remove()
            hooked.handle = None


def _put_first(parameter: torch.Tensor, key: int) -> None:
    """Moves one of a parameter's hooks before the others."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not isinstance(hooks, dict) or key not in hooks:
        return  # a subclass may store hooks differently
    # The engine calls hooks in the order of insertion, whatever the order of the dictionary.
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)
