"""Records optimizer steps, which end the steps of the trace, through PyTorch's global hooks."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.autograd import watch_gradients
from ddltrace.tracer.interpose.import_hooks import after_import
from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.record.recorder import PHASE_CODE

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_OPTIMIZER: Final = PHASE_CODE["optimizer"]

_now = time.monotonic_ns


def install(context: PatchContext) -> None:
    """Registers the hooks around every optimizer's step.

    Args:
        context: The parts of the recording rank.
    """
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    observer, recorder, steps = _Observer(context), context.recorder, context.steps

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            observer.before(optimizer)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("optimizer hook", error)

    # While recording is switched off, this alone sees the job, once in a step.
    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if recorder.off:
                steps.count_update(id(optimizer), _now())
            else:
                observer.after(optimizer)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("optimizer hook", error)

    before_hooks: list[Any] = []

    def switch(on: bool) -> None:
        """Called by `after_step`, when no list of hooks before a step is being read."""
        observer.switch()
        while before_hooks:
            before_hooks.pop().remove()
        if on:
            before_hooks.append(register_optimizer_step_pre_hook(before_step))

    switch(not recorder.off)
    register_optimizer_step_post_hook(after_step)
    context.on_switch.append(switch)

    def time_distributed(module: Any) -> None:
        optimizer_class = module.DistributedOptimizer
        replacement = _timed(context, observer, optimizer_class.step)
        context.patches.put(optimizer_class, "step", replacement)

    after_import("torch.distributed.optim.optimizer", quiet(time_distributed, context.fault))


def _timed(
    context: PatchContext, observer: _Observer, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps ``DistributedOptimizer.step``, which lets the owners of parameters update them.

    It returns when all of them have. The owners' own optimizers step in threads of the RPC agent:
    those of this process are part of this step.
    """
    begin, end = quiet(observer.begin, context.fault), quiet(observer.end, context.fault)

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(self)
        observer.distributed += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            observer.distributed -= 1
            end(self)

    return step


def _steps_on_stack() -> int:
    """Number of optimizer steps running on this thread; call it below a hook's function."""
    frame: FrameType | None = sys._getframe(3)  # PyTorch's function around every step
    assert frame is not None
    code, count = frame.f_code, 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


class _Observer:
    """Times the outermost optimizer; ZeRO's holds another one inside.

    Attributes:
        distributed: How many steps of a ``DistributedOptimizer`` this process waits for.
    """

    def __init__(self, context: PatchContext) -> None:
        self._context = context
        self._site = context.recorder.site("phase", "optimizer")
        self._device_site = context.recorder.site("kernel", "optimizer")
        self._mark: int | None = None
        self._running: list[int] = []
        self._start = 0
        self.distributed = 0
        self._known: WeakIdentityMap[Any, bool] = WeakIdentityMap()

    def before(self, optimizer: Any) -> None:
        """Hook before a step."""
        if self._running and not self.distributed:
            self._forget_raised(_steps_on_stack() - 1)
        if (self.distributed or not self._running) and not self._known.get(optimizer):
            self._register_parameters(optimizer)
        if not self.distributed:
            self.begin(optimizer)

    def begin(self, optimizer: Any) -> None:
        """An optimizer begins its step, perhaps inside another one's."""
        self._running.append(id(optimizer))
        if len(self._running) > 1:
            return
        context = self._context
        self._start = start = _now()
        context.steps.begin_update(id(optimizer), start)
        context.recorder.enter_phase(_OPTIMIZER, start)
        device = None if context.recorder.paused else context.device.timer
        self._mark = None if device is None else device.mark()

    def after(self, optimizer: Any) -> None:
        """Hook after a step."""
        if not self.distributed:
            self.end(optimizer)

    def end(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if not self._running:
            return  # recording was switched on inside
        # A step that raised left its entry behind: all entries above this one are removed as well.
        while self._running and self._running[-1] != id(optimizer):
            self._running.pop()
        if self._running:
            self._running.pop()
        if self._running:
            return
        end = _now()
        context = self._context
        device = context.device.timer
        if self._mark is not None and device is not None:
            device.interval(self._device_site, self._mark)
            self._mark = None
        context.recorder.leave_phase(end)
        if not context.recorder.paused:
            context.recorder.add(self._site, self._start, end, threading.get_ident())
        context.steps.end_update(end)
        context.registry.forget_gradients()
        if context.registry.changed:
            context.save_info()

    def switch(self) -> None:
        """Forgets the running optimizers: the ends of outer ones are not seen after a switch."""
        self._running.clear()

    def _forget_raised(self, running: int) -> None:
        """Drops steps that raised an exception, whose end no hook reports."""
        if running == 0:
            self._context.recorder.leave_phase(_now())
        del self._running[running:]

    def _register_parameters(self, optimizer: Any) -> None:
        """Names the parameters that belong to no module that was called."""
        self._known.set(optimizer, True)
        new = self._context.registry.add_parameters(
            (f"param_groups.{g}.{i}", parameter)
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        )
        watch_gradients(self._context, new)
