"""OD-SGD in a job: updates come one step late, and a local copy of the weights hides it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from ddltrace.experiments.engine.create_exchange import create_message_exchange
from ddltrace.experiments.engine.deferred_update import DeferredUpdate
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.parameter_access import (
    raw_gradient,
    set_gradient,
    sharing_memory,
    update_when_used,
    updated,
)
from ddltrace.experiments.engine.payloads import Payloads
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.step_in_progress import Usage
from ddltrace.experiments.frequency.frequency import StepContext, StepPolicy
from ddltrace.experiments.messages.message_exchange import Handle
from ddltrace.experiments.messages.message_plan import Message, MessagePlan, describe_gradient
from ddltrace.experiments.messages.trace_marks import carrying, optimizer_phase, region
from ddltrace.experiments.observation.notes import report_restriction
from ddltrace.experiments.schedules.odsgd import OdSgd
from ddltrace.experiments.strategy.job_checks import refused_optimizer
from ddltrace.experiments.strategy.strategy import Strategy


@dataclass
class _Delayed:
    """The exchange of one step's gradients, and the state before its update.

    Attributes:
        messages: The messages in flight.
        averages: Receive the averaged gradients, by the parameter's index.
        weights: The global weights before the update, by index.
        versions: Version counters of the parameters after the local step, by index.
        update: The optimizer with its settings in that step.
        usage: Which parameters got a gradient on some rank.
    """

    messages: list[tuple[Message, Handle]]
    averages: dict[int, torch.Tensor]
    weights: dict[int, torch.Tensor]
    versions: dict[int, int]
    update: DeferredUpdate
    usage: Usage


class OneStepDelay(StepPolicy):
    """Replaces each update by that of the step before, and a step of the local copy.

    The gradients that travel are those that the optimizer would see: a job that clips them
    clips each rank's own. From a forward pass with gradients to the optimizer's step the
    parameters hold the local copy. Whatever uses them before that, such as a checkpoint, a moving
    average or an evaluation, gets the global weights, with all updates applied.
    """

    steps_alone: ClassVar[bool] = True

    def __init__(self, strategy: Strategy, context: StepContext) -> None:
        """Creates the policy. Collective.

        Args:
            strategy: With `OdSgd` as its schedule.
            context: The model's parameters, its ranks and their exchange.
        """
        super().__init__(context)
        assert isinstance(strategy.schedule, OdSgd)
        self._schedule = strategy.schedule
        self._strategy = strategy
        self._spec = strategy.spec
        self._names = [name for name, _ in context.parameters]
        self._parameters = [parameter for _, parameter in context.parameters]
        # A group of its own: broadcasts of buffers must not queue behind gradients.
        self._group = new_group_like(context.group, "delayed exchange")
        self._exchange = create_message_exchange(strategy, self._group)
        self._index_of = {id(p): index for index, p in enumerate(self._parameters)}
        self._payloads: dict[int, Payloads] = {}
        self._plans: dict[tuple[int, ...], MessagePlan] = {}
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._updates = 0
        self._first: weakref.ref[Optimizer] | None = None
        self._averaged = True
        self._at_once = False
        self._delayed: dict[int, _Delayed] = {}

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged in backward, which is so during the warm-up."""
        self._averaged = self._updates < self._schedule.warmup
        return self._averaged

    def before_update(self, optimizer: Optimizer) -> bool:
        """After the warm-up: applies the update of the step before and starts this step's."""
        self._check(optimizer)
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._updates += 1
        if self._averaged:
            return True
        indices = self._indices_of(optimizer)
        own = {index: raw_gradient(self._parameters[index]) for index in indices}
        self._apply(id(optimizer))
        for index, gradient in own.items():
            set_gradient(self._parameters[index], gradient)
        self._delayed[id(optimizer)] = self._start(optimizer, own)
        updating = {index: self._parameters[index] for index in own}
        self._at_once = bool(sharing_memory(updating, self._parameters))
        for parameter in updating.values():
            update_when_used(parameter, self.settle)
        return False

    def after_update(self, optimizer: Optimizer) -> None:
        """Ends the delay at once where the job would read the local copy through other tensors."""
        del optimizer
        if self._at_once:
            report_restriction(
                self._spec,
                "the job keeps tensors that share memory with parameters, such as views, which "
                "would show the local copy; updates are not delayed",
            )
            self.settle()

    def begin_forward(self) -> None:
        """The forward pass uses the local copy."""
        for parameter in self._parameters:
            updated(parameter)

    def settle(self) -> None:
        """Sets the parameters to the global weights with all updates. Other ranks may continue."""
        if not self._delayed:
            return
        with optimizer_phase():
            for key in list(self._delayed):
                self._apply(key)

    def _indices_of(self, optimizer: Optimizer) -> list[int]:
        updated_here = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [index for key, index in self._index_of.items() if key in updated_here]

    @torch.no_grad()
    def _start(self, optimizer: Optimizer, own: dict[int, torch.Tensor | None]) -> _Delayed:
        """Sends the gradients of this step, and takes the local step with them."""
        update = DeferredUpdate(optimizer)
        update.remember_settings()
        parameters = self._parameters
        sent = {
            index: torch.zeros_like(parameters[index]) if gradient is None else gradient
            for index, gradient in own.items()
        }
        messages = []
        payloads = self._payloads.setdefault(id(optimizer), Payloads(copies=True))
        plan = self._plan_of(tuple(own))
        self._exchange.prepare(plan.gradients)
        for message in self._schedule.dispatcher(plan).backward_ended():
            payload = payloads.gather(message, sent)
            with self._carrying(message):
                messages.append((message, self._exchange.start(message, payload)))
        present = [index for index, gradient in own.items() if gradient is not None]
        usage = Usage(parameters, present, self._group)
        weights = {index: parameters[index].detach().clone() for index in own}
        for group in optimizer.param_groups:
            self._step_locally(group, optimizer.state, own)
        return _Delayed(
            messages,
            {index: torch.empty_like(parameters[index]) for index in own},
            weights,
            {index: parameters[index]._version for index in own},
            update,
            usage,
        )

    def _plan_of(self, indices: tuple[int, ...]) -> MessagePlan:
        """The messages of some gradients: backward creates them from the output layer on."""
        plan = self._plans.get(indices)
        if plan is None:
            gradients = [
                describe_gradient(index, self._names[index], self._parameters[index])
                for index in reversed(indices)
            ]
            plan = self._plans[indices] = self._schedule.plan(gradients)
        return plan

    def _step_locally(
        self,
        group: dict[str, Any],
        state: Mapping[torch.Tensor, dict[str, Any]],
        own: Mapping[int, torch.Tensor | None],
    ) -> None:
        """Takes the optimizer's step with this rank's own gradients; its state stays."""
        parameters, gradients, velocities = [], [], []
        for parameter in group["params"]:
            gradient = own.get(self._index_of.get(id(parameter), -1))
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
                velocity = state.get(parameter, {}).get("momentum_buffer")
                velocities.append(None if velocity is None else velocity.clone())
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach")
        sgd(parameters, gradients, velocities, **{name: group[name] for name in names})

    @torch.no_grad()
    def _apply(self, optimizer: int) -> None:
        """Waits for the averages of the step before, and updates the global weights."""
        delayed = self._delayed.pop(optimizer, None)
        if delayed is None:
            return
        for index in delayed.weights:
            updated(self._parameters[index])
        with region("wait", "gradients of the step before"):
            for message, handle in delayed.messages:
                with self._carrying(message):
                    averaged = handle.wait()
                self._payloads[optimizer].scatter(message, averaged, delayed.averages)
            used = {index for index in delayed.averages if delayed.usage.anywhere(index)}
        gradients = []
        for index, weights in delayed.weights.items():
            parameter = self._parameters[index]
            # What the job itself wrote meanwhile, such as a loaded checkpoint, stays.
            if parameter._version == delayed.versions[index]:
                parameter.copy_(weights)
                if index in used:
                    gradients.append((parameter, delayed.averages[index]))
        delayed.update.apply(gradients)

    def _carrying(self, message: Message) -> Any:
        indices = dict.fromkeys(part.gradient for part in message.slices)
        return carrying(None, [self._parameters[index] for index in indices])

    def _check(self, optimizer: Optimizer) -> None:
        """Rejects optimizers that the local step does not support."""
        if optimizer not in self._checked:
            self._checked.add(optimizer)
            kinds = [kind.__name__ for kind in type(optimizer).__mro__]
            if (reason := refused_optimizer(self._strategy, kinds)) is not None:
                refuse(self._spec, reason)
        for index in self._indices_of(optimizer):
            gradient = raw_gradient(self._parameters[index])
            if gradient is not None and gradient.is_sparse:
                refuse(
                    self._spec,
                    f"the gradient of {self._names[index]!r} is sparse; use sparse=False",
                )
