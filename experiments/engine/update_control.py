"""Controls every optimizer step of a model: deferral, frequency, optimizer rules."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddltrace.experiments.engine import checkpoint_state
from ddltrace.experiments.engine.deferred_update import DeferredUpdate, update_by_rule
from ddltrace.experiments.engine.parameter_access import raw_gradient, set_gradient
from ddltrace.experiments.engine.pending_averages import PendingAverages
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.frequency.frequency import EveryStep, StepPolicy
from ddltrace.experiments.observation.notes import report_restriction
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule


class GradientExchange(Protocol):
    """What averages a model's gradients in backward, as `ModelExchange` does.

    Attributes:
        backward_passes: Backward passes that have begun.
        passes_with_gradients: Those that have left gradients.
        pending: The averages that are in flight after backward.
        waits_by_layer: Whether updates are deferred to each layer's next forward.
    """

    backward_passes: int
    passes_with_gradients: int
    pending: PendingAverages
    waits_by_layer: bool

    def left_behind(self) -> str:
        """Which gradients were not exchanged, and why; empty if none."""
        ...

    def take_momentum(self, momentum: float) -> None:
        """Takes over the momentum of the job's optimizer."""
        ...


class UpdateControl:
    """Hooks around the steps of the optimizers that update one model.

    A job does not have to name its optimizer: PyTorch's global hooks report every step, and an
    optimizer belongs to a model if it updates one of its parameters.
    """

    def __init__(
        self,
        spec: str,
        parameters: list[nn.Parameter],
        exchange: GradientExchange,
        policy: StepPolicy,
        rule: OptimizerRule | None,
        *,
        takes_momentum: bool = False,
    ) -> None:
        self.steps = 0
        self._spec = spec
        self._own = {id(parameter) for parameter in parameters}
        self._parameters = parameters
        self._exchange = exchange
        self._policy = policy
        self._rule = rule
        self._takes_momentum = takes_momentum
        self._deferred: weakref.WeakKeyDictionary[Optimizer, DeferredUpdate] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._skips = False
        self._turn = 0
        self._turn_of: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._passes = 0
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._momenta: list[tuple[dict[str, Any], float]] = []
        self._before_pass: list[torch.Tensor] = []
        self._passes_before = 0
        self._number = next(_numbers)
        _controls[self._number] = self
        _install()

    def updates_with(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates a parameter of this model."""
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])

    @property
    def ends_before_others(self) -> bool:
        """Whether other ranks would wait for this rank's next step."""
        return self._policy.ends_before_others

    @property
    def changes_updates(self) -> bool:
        """Whether optimizer steps must be observed."""
        return self._replaces_updates or type(self._policy) is not EveryStep

    @property
    def _replaces_updates(self) -> bool:
        """Whether some steps of the optimizer are split, replaced or left out."""
        return (
            self._exchange.waits_by_layer
            or self._rule is not None
            or self._takes_momentum
            or not isinstance(self._policy, EveryStep)
        )

    @property
    def needs_updates(self) -> bool:
        """Whether the strategy takes effect in the steps of an optimizer."""
        return self._policy.acts_on_updates or self._rule is not None or self._takes_momentum

    def begin_forward(self) -> None:
        """Before a forward pass that records gradients."""
        self._policy.begin_forward()

    def begin_pass(self) -> None:
        """Before a backward pass that DistributedDataParallel would synchronize.

        Ends a job in which the strategy has not carried what the passes before it have left.
        """
        self.check()
        self._passes_before = self._exchange.passes_with_gradients
        if self.needs_updates and self.steps == 0:
            self._before_pass = [p.detach().clone() for p in self._parameters]

    def check(self) -> None:
        """Ends a job whose last backward pass has left what the strategy cannot carry.

        Raises:
            StrategyRefusedError: Gradients were not exchanged, or the job updates its model by
                hand and the strategy has to replace an optimizer's steps.
        """
        left_behind = self._exchange.left_behind()
        if left_behind:
            refuse(self._spec, left_behind)
        if (
            self._before_pass
            and self._exchange.passes_with_gradients > self._passes_before
            and not all(map(torch.equal, self._before_pass, self._parameters))
        ):
            refuse(
                self._spec,
                "the job changes its parameters without an optimizer of PyTorch, and the strategy "
                "takes effect in the steps of an optimizer; use one of torch.optim",
            )

    def check_end(self) -> None:
        """At the end of the job, as `check`; also says if nothing was exchanged.

        Raises:
            StrategyRefusedError: As of `check`.
        """
        self.check()
        if self._exchange.passes_with_gradients == 0:
            report_restriction(
                self._spec,
                "nothing was exchanged, because no backward pass went through a forward pass of "
                "DistributedDataParallel that synchronizes gradients",
            )

    def _check_first_step(self, optimizer: Optimizer) -> None:
        if self.steps or self._exchange.passes_with_gradients or not self.needs_updates:
            return
        gradients = [
            raw_gradient(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._own
        ]
        if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
            refuse(
                self._spec,
                "no backward pass before the job's first optimizer step is one that "
                "DistributedDataParallel synchronizes",
            )

    def before(self, optimizer: Optimizer) -> None:
        """Just before the optimizer reads the gradients."""
        self._check_first_step(optimizer)
        if not self.changes_updates:
            return
        self._check_step(optimizer)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._check(optimizer)
            optimizer.register_state_dict_pre_hook(self._complete_checkpoint)
            optimizer.register_load_state_dict_pre_hook(self._settle_before_load)
            checkpoint_state.save_with(optimizer, self._policy.state)
        self.restore(optimizer)
        if self._takes_momentum:
            self._take_momentum(optimizer)
        self._skips = not self._unscaled(optimizer)
        with torch.no_grad():
            updates = not self._skips and self._policy.before_update(optimizer)
        if not updates:
            self._hide(optimizer)
            return
        if self._exchange.waits_by_layer:
            update = self._deferred.get(optimizer)
            if update is None:
                update = self._deferred[optimizer] = DeferredUpdate(optimizer, self._rule)
            self._hidden += self._exchange.pending.defer(update)
        if self._rule is not None:
            update_by_rule(self._rule, optimizer)
            self._hide(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        """Just after the optimizer's step."""
        for parameter, gradient in self._hidden:
            set_gradient(parameter, gradient)
        self._hidden.clear()
        self._exchange.pending.show()
        for group, momentum in self._momenta:
            group["momentum"] = momentum
        self._momenta.clear()
        self.steps += 1
        self._before_pass.clear()
        if self._skips:
            self._skips = False
        else:
            with torch.no_grad():
                self._policy.after_update(optimizer)

    def settle(self) -> None:
        """Waits for pending messages and applies them."""
        self._exchange.pending.settle()
        self._policy.settle()

    def end(self) -> None:
        """At the end of the job: applies all pending messages."""
        self.settle()
        with torch.no_grad():
            self._policy.end()

    def restore(self, optimizer: Optimizer) -> None:
        """Restores the policy's state from the checkpoint that the optimizer has loaded, if any."""
        state = checkpoint_state.take_loaded(optimizer)
        if state is None:
            return
        try:
            self._policy.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            refuse(self._spec, f"the optimizer's checkpoint does not fit: {error}")

    def close(self) -> None:
        """Stops observing optimizers."""
        _controls.pop(self._number, None)

    def _settle_before_load(self, optimizer: Optimizer, checkpoint: dict[str, Any]) -> None:
        """What is due belongs to the state before."""
        del optimizer, checkpoint
        self.settle()

    def _complete_checkpoint(self, optimizer: Optimizer) -> None:
        self.settle()
        self._policy.complete_checkpoint(optimizer)

    def _hide(self, optimizer: Optimizer) -> None:
        """Removes the gradients during the step, so that nothing is updated."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = raw_gradient(parameter)
                if gradient is not None and id(parameter) in self._own:
                    self._hidden.append((parameter, gradient))
                    set_gradient(parameter, None)

    def _take_momentum(self, optimizer: Optimizer) -> None:
        """Turns off the optimizer's momentum, which the codec applies, in this step.

        Schedulers and checkpoints of the job see its own.
        """
        for group in optimizer.param_groups:
            if "momentum" not in group:
                refuse(
                    self._spec,
                    "its codec takes the place of SGD's momentum, and the job uses "
                    f"{type(optimizer).__name__}; use torch.optim.SGD",
                )
            self._momenta.append((group, group["momentum"]))
            if any(id(parameter) in self._own for parameter in group["params"]):
                self._exchange.take_momentum(float(group["momentum"]))
            group["momentum"] = 0.0

    def _unscaled(self, optimizer: Optimizer) -> bool:
        """Completes the work of a GradScaler that has left it to a fused optimizer.

        Returns:
            Whether the optimizer steps: all gradients are finite.
        """
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and bool(found_inf):
            return False
        if scale is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        return True

    def _check_step(self, optimizer: Optimizer) -> None:
        """Rejects what would let the ranks make different numbers of steps."""
        if self._exchange.backward_passes != self._passes:
            self._passes = self._exchange.backward_passes
            self._turn += 1
        others = (turn for other, turn in self._turn_of.items() if other is not optimizer)
        if self._policy.one_optimizer and self._turn in others:
            refuse(
                self._spec,
                "the job updates its model with several optimizers in one step, and the strategy "
                "exchanges parameters after the step of one; use one with several parameter groups",
            )
        former = self._turn_of.get(optimizer, self._turn)
        self._turn_of[optimizer] = self._turn
        if self._policy.all_optimizers and former < self._turn - 1:
            refuse(
                self._spec,
                "several optimizers update the model by turns, each after a backward pass of its "
                "own, and the strategy adds up the gradients of all passes; wrap each part of the "
                "model in a DistributedDataParallel of its own",
            )

    def _check(self, optimizer: Optimizer) -> None:
        """Rejects optimizers whose step cannot be split or replaced."""
        kind = type(optimizer).__name__
        if self._replaces_updates and (
            isinstance(optimizer, LBFGS) or kind == "ZeroRedundancyOptimizer"
        ):
            refuse(
                self._spec,
                f"{kind} updates all parameters together, and the strategy has to update them "
                "apart; use an optimizer such as SGD or AdamW",
            )
        if self._policy.steps_alone and _called_by_scaler():
            refuse(
                self._spec,
                "a GradScaler skips steps by each rank's own gradients, and the ranks would "
                "no longer step together; use bfloat16, which needs no scaler",
            )


def _called_by_scaler() -> bool:
    """Whether a GradScaler that is enabled has called the optimizer's step."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


_numbers: Final = itertools.count()
_controls: Final[weakref.WeakValueDictionary[int, UpdateControl]] = weakref.WeakValueDictionary()
"""In the order of their creation, which is the same on all ranks: what they do is collective."""
_installed: Final[list[bool]] = []
on_step: Final[list[Callable[[Optimizer], None]]] = []
"""Called after every optimizer step of the process, after all controls."""
before_step: Final[list[Callable[[Optimizer], None]]] = []
"""Called before every optimizer step of the process."""


def install_hooks() -> None:
    """Registers PyTorch's global optimizer hooks, once."""
    _install()


def _install() -> None:
    if not _installed:
        _installed.append(True)
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        checkpoint_state.install()
        checkpoint_state.on_load.append(_restore)


def end_last_step(optimizer: Optimizer) -> None:
    """To be called when a rank will make no further step, before it waits for other ranks.

    Args:
        optimizer: The optimizer of the last step.
    """
    for control in _controls_of(optimizer):
        if control.ends_before_others:
            control.end()


def _controls_of(optimizer: Optimizer) -> list[UpdateControl]:
    return [control for control in list(_controls.values()) if control.updates_with(optimizer)]


def _restore(optimizer: Optimizer) -> None:
    for control in _controls_of(optimizer):
        control.restore(optimizer)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    for call in before_step:
        call(optimizer)
    controls = [c for c in _controls_of(optimizer) if c.changes_updates or c.needs_updates]
    if not controls:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        for control in controls:
            control.before(optimizer)
        return None

    def backward_first() -> Any:
        # The gradients exist only when the closure has run backward.
        with torch.enable_grad():
            loss = closure()
        for control in controls:
            control.before(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": backward_first}
    return (args[0], backward_first, *args[2:]), kwargs


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for control in _controls_of(optimizer):
        control.after(optimizer)
    for call in on_step:
        call(optimizer)
