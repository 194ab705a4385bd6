"""Averages the gradients of one model by its strategy, from hooks of the parameters."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from ddltrace.experiments.engine.agreed_plan import AgreedPlan
from ddltrace.experiments.engine.communicators import (
    Communicator,
    DirectCommunicator,
    ThreadedCommunicator,
)
from ddltrace.experiments.engine.gradient_hooks import GradientHooks
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.layer_order import LayerOrder
from ddltrace.experiments.engine.parameter_access import raw_gradient, set_gradient
from ddltrace.experiments.engine.payloads import Payloads
from ddltrace.experiments.engine.pending_averages import PendingAverages, named
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.step_in_progress import (
    Flight,
    SparseFlight,
    StepInProgress,
    Usage,
)
from ddltrace.experiments.frequency.frequency import StepPolicy
from ddltrace.experiments.messages.message_exchange import MessageExchange
from ddltrace.experiments.messages.message_plan import Message
from ddltrace.experiments.messages.trace_marks import carrying, region
from ddltrace.experiments.observation.notes import report_restriction
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.tracer.number_text import counted


class ModelExchange:
    """Sends gradients in the order of a schedule, as `AgreedPlan` lays out.

    Attributes:
        backward_passes: Backward passes that have begun.
        passes_with_gradients: Those that have left gradients.
        pending: The averages that are in flight after backward.
        waits_by_layer: Whether updates are deferred to each layer's next forward.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        schedule: Schedule,
        *,
        spec: str,
        exchange: MessageExchange,
        policy: StepPolicy,
        group: dist.ProcessGroup,
        find_unused_parameters: bool,
    ) -> None:
        """Registers the hooks. Collective.

        Args:
            model: The module whose layers wait for their parameters, if the schedule requires it.
            parameters: The trainable parameters with their names, the same on all ranks.
            schedule: Order and grouping of messages.
            spec: The strategy's spec, for messages to the user.
            exchange: Averages one message.
            policy: Determines in which backward passes gradients are exchanged.
            group: The ranks.
            find_unused_parameters: Whether a step may leave parameters without a gradient; as
                in DistributedDataParallel this rank then contributes what they had, or zero, and
                they keep what they had if no rank used them.
        """
        self._spec = spec
        self._exchange = exchange
        self._policy = policy
        self._group = group
        self._find_unused = find_unused_parameters
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._payloads = Payloads(copies=False)
        self._armed = False
        self._end_awaited = False
        self._exchanges = True
        self._used_before: set[int] = set()
        self._parts: list[int] = []
        self.backward_passes = 0
        self.passes_with_gradients = 0
        self._kept_apart = False
        self._versions: list[tuple[int, int] | None] = []
        self._step = StepInProgress(None, None)
        self._lock = threading.Lock()
        self._communicator = self._make_communicator(schedule)
        self.pending = PendingAverages(parameters, spec, self._communicator)
        self.waits_by_layer = schedule.wait == "layer"
        self._hooks = GradientHooks(
            self._parameters,
            self._gradient_ready,
            self._before_adding if self.waits_by_layer else None,
        )
        self._layers = (
            LayerOrder(model, self._parameters, self.pending.settle_layer)
            if self.waits_by_layer
            else None
        )
        self._plan = AgreedPlan(schedule, model, parameters, self._layers, group)

    def left_behind(self) -> str:
        """Which gradients of earlier backward passes were not exchanged, and why; empty if none."""
        if self._kept_apart:
            return (
                "torch.distributed.autograd keeps gradients apart from the parameters, where the "
                "strategy cannot exchange them; run the job without --strategy"
            )
        computed = len(self._step.counts)
        if self._armed and self._exchanges and computed:
            return (
                f"a backward pass has computed {computed} of {len(self._parameters)} gradients and "
                "has not ended, so they were not exchanged"
            )
        return ""

    def begin_backward(self) -> None:
        """To be called after a forward pass whose backward pass synchronizes gradients."""
        self.backward_passes += 1
        self._hooks.renew()
        self.pending.end_forward()
        self._exchanges = self._policy.exchanges_gradients()
        if self._plan.change(exchanges=self._exchanges):
            assert self._plan.plan is not None
            self._payloads = Payloads(copies=False)
            self._exchange.prepare(self._plan.plan.gradients)
        self._armed = True
        self._versions = [_version(p) for p in self._parameters] if _uses_rpc() else []
        self._end_awaited = False
        self._step = StepInProgress(self._plan.plan, self._plan.dispatcher())
        self.pending.begin(self._step)

    def backward_begun(self) -> None:
        """To be called in backward, at an output of the model: before any gradient is ready.

        Activation checkpoints may run a backward pass inside the one that the job called. The
        callback of the first gradient would then run when the inner one has ended.
        """
        if self._armed and self._exchanges and not self._end_awaited:
            self._end_awaited = True
            # As in DistributedDataParallel, gradients are averages after backward.
            Variable._execution_engine.queue_callback(self._finish)

    def take_momentum(self, momentum: float) -> None:
        """Hands the momentum of the job's optimizer over to the exchange of messages."""
        self._exchange.take_momentum(momentum)

    def close(self) -> None:
        """Waits for pending messages, applies them, and removes all hooks from the model."""
        self.pending.settle()
        self._hooks.close()
        if self._layers is not None:
            self._layers.close()
        self._communicator.close()
        self._exchange.close()

    def _make_communicator(self, schedule: Schedule) -> Communicator:
        leader = schedule.agreement == "leader"
        if not leader and self._exchange.rounds == 1:
            return DirectCommunicator(self._launch, self._land)
        order_group = new_group_like(self._group, "order", backend="gloo") if leader else None
        cycle_ms = schedule.cycle_ms
        return ThreadedCommunicator(
            self._launch,
            self._land,
            order_group=order_group,
            has_arrived=self._has_arrived,
            tick=self._tick,
            cycle_s=None if cycle_ms is None else cycle_ms / 1e3,
            one_in_flight=schedule.one_in_flight,
        )

    def _before_adding(self, index: int) -> None:
        """What a backward pass without a forward pass of its own adds is added to the average."""
        if not self._armed:
            self.pending.settle([index])

    def _gradient_ready(self, index: int) -> None:
        parameter = self._parameters[index]
        if not self._armed:
            self._used_before.add(index)
            return
        if self._versions and self._versions[index] == _version(parameter):
            self._kept_apart = True
            return
        if raw_gradient(parameter) is None:
            # Taken away by a hook of the job: as in DistributedDataParallel, this rank sends zeros.
            set_gradient(parameter, torch.zeros_like(parameter))
        step = self._step
        if not self._exchanges:
            self.passes_with_gradients += not step.counts
            step.counts[index] = 1
            self._policy.gradient_ready(parameter, exchanged=False)
            return
        self._check_arrival(index)
        if not step.counts:
            self.passes_with_gradients += 1
            self.backward_begun()
            self._exchange.begin_step()
            if step.plan is not None:
                self._communicator.begin(step)
        step.counts[index] = step.counts.get(index, 0) + 1
        if step.plan is None:
            # Nothing is sent before backward has ended: further parts of the gradient may come.
            step.arrived[index] = None
        elif step.counts[index] == self._parts[index]:
            self._complete(step, index)

    def _complete(self, step: StepInProgress, index: int) -> None:
        """Takes a gradient to which this backward pass adds nothing more."""
        parameter = self._parameters[index]
        self._policy.gradient_ready(parameter, exchanged=True)
        gradient = raw_gradient(parameter)
        assert gradient is not None
        self._plan.gradient_ready(index, gradient)
        if gradient.is_sparse:
            step.arrived[index] = None
            step.sparse_gradients[index] = gradient
            return
        step.gradients[index] = gradient
        self._arrive(step, index)

    def _complete_all(self, step: StepInProgress) -> None:
        """Takes the gradients of which further parts could have come, when backward has ended.

        Checkpoints that run backward inside backward give the gradient of a shared layer in parts,
        as many in each step.
        """
        if step.plan is None:
            self._parts = [step.counts.get(index, 1) for index in range(len(self._parameters))]
        for index in list(step.counts):
            if step.plan is None or index not in step.arrived:
                self._complete(step, index)

    def _arrive(self, step: StepInProgress, index: int) -> None:
        with self._lock:
            step.arrived[index] = None
            if step.dispatcher is not None:
                self._communicator.start(step, step.dispatcher.gradient_ready(index))
        if isinstance(self._communicator, ThreadedCommunicator):
            self._communicator.arrived()

    def _check_arrival(self, index: int) -> None:
        name = self._names[index]
        if self._step.plan is not None and self._step.counts.get(index, 0) == self._parts[index]:
            refuse(
                self._spec,
                f"parameter {name!r} got more gradients in one backward pass than in the first "
                "step",
            )
        if self.pending.used_before_update(index):
            refuse(
                self._spec,
                f"parameter {name!r} was used outside the forward of its own layer, before its "
                "last update; use a schedule that does not wait before the layers",
            )

    def _finish(self) -> None:
        """Runs when backward has ended: starts the remaining messages, and waits if the schedule
        does."""
        self._end_awaited = False
        step = self._step
        if not self._armed or not step.counts:
            return  # nothing but gradients of inputs was computed
        self._armed = False
        self._complete_all(step)
        missing = [i for i in range(len(self._parameters)) if i not in step.arrived]
        if missing and not self._find_unused:
            names = ", ".join(repr(self._names[i]) for i in missing[:5])
            raise RuntimeError(
                f"{counted(len(missing), 'parameter')} got no gradient in this step ({names}); "
                "use find_unused_parameters=True"
            )
        if step.plan is None:
            self._adopt_plan(step, missing)
        # As in DistributedDataParallel, what was used under no_sync counts as used.
        used = {*step.arrived, *self._used_before}
        used.update(index for index in missing if self._fill_in(step, index))
        self._used_before.clear()
        with self._lock:
            step.ended = True
            if step.dispatcher is not None:
                left = list(step.dispatcher.backward_ended())
                if self._plan.schedule.one_in_flight:
                    left += step.dispatcher.rest()
                # Backward has ended, though the autograd engine has not returned yet: this time
                # is the exchange's, and must not count as computation that hides messages.
                with region("wait", "launch of messages") if left else contextlib.nullcontext():
                    self._communicator.start(step, left)
        if isinstance(self._communicator, ThreadedCommunicator):
            self._communicator.arrived()
        for index in sorted(step.sparse_gradients):
            with carrying(f"{self._names[index]} sparse", [self._parameters[index]]):
                step.sparse[index] = SparseFlight(step.sparse_gradients.pop(index), self._group)
        if self._find_unused:
            step.usage = Usage(self._parameters, sorted(used), self._group)
        step.unsettled = set(step.gradients) | set(step.sparse)
        if self.waits_by_layer:
            self.pending.wait_when_read()
        else:
            self.pending.settle_all()

    def _fill_in(self, step: StepInProgress, index: int) -> bool:
        """Contributes to the average of a gradient that this backward pass did not compute.

        As in DistributedDataParallel that is the gradient of earlier passes, under no_sync, and
        zeros if there is none.

        Returns:
            Whether the policy had kept a gradient of the parameter.
        """
        assert step.plan is not None
        parameter = self._parameters[index]
        kept = self._policy.gradient_kept(parameter)
        gradient = raw_gradient(parameter) if kept is None else kept
        if index in step.plan.gradients:
            if gradient is None:
                step.gradients[index] = torch.zeros_like(parameter)
            else:
                # Not in place: it stays as it is if no rank has used the parameter.
                step.gradients[index] = _dense(gradient.detach()).clone()
        elif gradient is None:
            step.sparse_gradients[index] = _no_rows(parameter)
        else:
            step.sparse_gradients[index] = gradient.detach()
        return kept is not None

    def _adopt_plan(self, step: StepInProgress, missing: list[int]) -> None:
        """Agrees on a plan with the other ranks at the end of the first backward pass."""
        sparse = self._plan.agree(step, missing, find_unused=self._find_unused)
        if sparse:
            report_restriction(
                self._spec,
                f"the gradients of {named(self._names, sorted(sparse))} are sparse and are "
                "exchanged as such, one all_reduce each after backward; the strategy's codec and "
                "order do not apply to them",
            )
        assert step.plan is not None
        self._exchange.prepare(step.plan.gradients)
        self._communicator.begin(step)
        step.dispatcher = self._plan.dispatcher()
        if step.dispatcher is not None:
            for index in step.arrived:
                if index in step.gradients:
                    with self._lock:
                        self._communicator.start(step, step.dispatcher.gradient_ready(index))

    def _has_arrived(self, step: StepInProgress, message: Message) -> bool:
        return step.ended or all(
            part.gradient in step.arrived and part.gradient in step.gradients
            for part in message.slices
        )

    def _launch(self, step: StepInProgress, message: Message) -> Flight:
        payload = self._payloads.gather(message, step.gradients)
        with carrying(self._name(message), [self._parameters[i] for i in _gradients_of(message)]):
            handle = self._exchange.start(message, payload)
        return Flight(message, step, handle)

    def _land(self, flight: Flight) -> None:
        message, step = flight.message, flight.step
        with carrying(self._name(message), [self._parameters[i] for i in _gradients_of(message)]):
            averaged = flight.handle.wait()
        self._payloads.scatter(message, averaged, step.gradients)
        flight.landed.set()
        with self._lock:
            if step.dispatcher is not None:
                self._communicator.start(step, step.dispatcher.completed(message))

    def _tick(self) -> None:
        with self._lock:
            step = self._step
            if step.dispatcher is not None:
                self._communicator.start(step, step.dispatcher.tick())

    def _name(self, message: Message) -> str | None:
        """The name of a message in the trace; None for the default name."""
        if message.priority is None:
            return None
        first = message.slices[0]
        name = self._names[first.gradient]
        if first.elements < self._parameters[first.gradient].numel():
            name += f"[{first.start}:{first.stop}]"
        return f"{name} priority {message.priority}"


def _uses_rpc() -> bool:
    """Whether the job may run backward passes of `torch.distributed.autograd`."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and rpc.is_available() and bool(rpc._is_current_rpc_agent_set())


def _version(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Changes with every backward pass that leaves its gradient in the parameter."""
    gradient = raw_gradient(parameter)
    if gradient is None or gradient.is_sparse:
        return None if gradient is None else (id(gradient), gradient._version)
    return gradient.data_ptr(), gradient._version


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of zeros with the layout of those of embeddings: rows."""
    rows = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        rows, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _gradients_of(message: Message) -> list[int]:
    return list(dict.fromkeys(part.gradient for part in message.slices))
