"""Averages the gradients of one model by its strategy, from hooks of the parameters."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ddltrace.experiments.engine.communicators import (
    Communicator,
    DirectCommunicator,
    ThreadedCommunicator,
)
from ddltrace.experiments.engine.deferred_update import DeferredUpdate
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.layer_order import LayerOrder
from ddltrace.experiments.engine.parameter_access import (
    raw_gradient,
    set_gradient,
    sharing_memory,
    update_when_used,
    updated,
    wait_no_more,
    wait_when_read,
)
from ddltrace.experiments.engine.payloads import Payloads
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.schedule_calibration import GradientTiming, ScheduleSearch
from ddltrace.experiments.engine.step_in_progress import (
    Flight,
    SparseFlight,
    StepInProgress,
    Usage,
)
from ddltrace.experiments.frequency.frequency import StepPolicy
from ddltrace.experiments.messages.message_exchange import MessageExchange
from ddltrace.experiments.messages.message_plan import (
    Gradient,
    Message,
    MessagePlan,
    describe_gradient,
)
from ddltrace.experiments.messages.trace_marks import carrying, optimizer_phase, region
from ddltrace.experiments.observation.notes import report_restriction
from ddltrace.experiments.schedules.base import Schedule

_NAMED: Final = 5
"""Maximum number of parameters named in a message to the user."""


class ModelExchange:
    """Sends gradients in the order of a schedule.

    The ranks' gradients may become ready in different orders, but all ranks must start their
    messages in one order. In the first step nothing starts before backward has ended; then
    rank 0 sends the order in which its gradients became ready to the others, and the plan follows
    this order. From then on messages go in the order of the plan, or as rank 0 decides.
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
        self._schedule = schedule
        self._spec = spec
        self._exchange = exchange
        self._policy = policy
        self._group = group
        self._find_unused = find_unused_parameters
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._index_of = {id(p): index for index, p in enumerate(self._parameters)}
        sparse_weights = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        }
        self._sparse = {i for key, i in self._index_of.items() if key in sparse_weights}
        self._payloads = Payloads(copies=False)
        self._plan: MessagePlan | None = None
        self._gradients: list[Gradient] = []
        search = schedule.search()
        self._search = None if search is None else ScheduleSearch(schedule, search, group)
        self._timing = GradientTiming(schedule, group) if schedule.timed_steps else None
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
        self._deferred: dict[int, DeferredUpdate] = {}
        self._left_over: set[int] = set()
        self._in_forward = False
        self._settling = threading.RLock()
        self._communicator = self._make_communicator()
        self._hooks: list[RemovableHandle] = []
        self._accumulators: dict[int, Any] = {}
        self._places: dict[int, tuple[torch.dtype, torch.device]] = {}
        self._watch_gradients()
        self._layers = (
            LayerOrder(model, self._parameters, self._settle_layer) if self.waits_by_layer else None
        )

    @property
    def waits_by_layer(self) -> bool:
        """Whether updates are deferred to each layer's next forward."""
        return self._schedule.wait == "layer"

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

    def begin_forward(self) -> None:
        """To be called before a forward pass whose backward pass synchronizes gradients."""
        self._in_forward = True
        self._left_over.clear()

    def begin_backward(self) -> None:
        """To be called after such a forward pass."""
        self.backward_passes += 1
        self._in_forward = False
        self._watch_gradients()
        # What no layer has waited for was not used in this forward pass, or used unawares.
        self._left_over.update(self._deferred)
        self._settle_all()
        self._exchanges = self._policy.exchanges_gradients()
        if self._exchanges:
            self._search_on()
        self._plan_by_time()
        self._armed = True
        self._versions = [_version(p) for p in self._parameters] if _uses_rpc() else []
        self._end_awaited = False
        dispatcher = None
        if self._plan is not None and self._decides:
            dispatcher = self._schedule.dispatcher(self._plan)
        self._step = StepInProgress(self._plan, dispatcher)
        if self._timing is not None and self._plan is not None and self._exchanges:
            self._timing.begin()

    def backward_begun(self) -> None:
        """To be called in backward, at an output of the model: before any gradient is ready.

        Activation checkpoints may run a backward pass inside the one that the job called. The
        callback of the first gradient would then run when the inner one has ended.
        """
        if self._armed and self._exchanges and not self._end_awaited:
            self._end_awaited = True
            # As in DistributedDataParallel, gradients are averages after backward.
            Variable._execution_engine.queue_callback(self._finish)

    def _search_on(self) -> None:
        """Lets the schedule's search change the plan, between two exchanges."""
        if self._plan is None or self._search is None:
            return
        chosen = self._search.after_step()
        if chosen is not None:
            self._change_plan(chosen)
        if self._search.over:
            self._search = None

    def _plan_by_time(self) -> None:
        """Makes a new plan when the times that the schedule requires have been measured."""
        if self._plan is None or self._timing is None:
            return
        measured = self._timing.after_step(self._gradients)
        if measured is not None:
            self._timing = None
            schedule, self._gradients = measured
            self._change_plan(schedule)

    def _change_plan(self, schedule: Schedule) -> None:
        """Switches to another schedule, while no message is in flight."""
        self._schedule = schedule
        self._plan = schedule.plan(self._gradients)
        self._payloads = Payloads(copies=False)
        self._exchange.prepare(self._plan.gradients)

    def settle(self) -> None:
        """Waits for all pending messages and stores their averages."""
        self._settle(list(self._step.unsettled))

    def defer(self, update: DeferredUpdate) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Takes gradients in flight from an optimizer that steps now.

        Args:
            update: Updates each of its parameters when the parameter's layer needs it, or when
                anything else uses the parameter.

        Returns:
            The parameters with their gradients, for `show`.
        """
        # A step without a backward pass of its own uses the same averages again.
        self._settle(list(self._deferred))
        own = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
        due = {i: p for i in self._step.unsettled if id(p := self._parameters[i]) in own}
        if not due:
            return []
        shared = sharing_memory(due, self._parameters)
        if shared:
            report_restriction(
                self._spec,
                f"{self._named(sorted(shared))} share memory with other tensors of the job, such "
                "as views that it has kept, and are updated in the optimizer's step, not in the "
                "next forward pass",
            )
            self._settle(shared)
        update.remember_settings()
        hidden = []
        for index in due.keys() - shared:
            parameter = self._parameters[index]
            wait_no_more(parameter)
            gradient = raw_gradient(parameter)
            if gradient is not None:
                hidden.append((parameter, gradient))
                set_gradient(parameter, None)
            self._deferred[index] = update
            update_when_used(parameter, functools.partial(self._settle_used, index))
        return hidden

    def show(self) -> None:
        """Lets the job read the gradients that were taken from an optimizer, as averages."""
        for index in self._deferred:
            parameter = self._parameters[index]
            if raw_gradient(parameter) is not None:
                wait_when_read(parameter, functools.partial(self._settle, [index]))

    def take_momentum(self, momentum: float) -> None:
        """Hands the momentum of the job's optimizer over to the exchange of messages."""
        self._exchange.take_momentum(momentum)

    def close(self) -> None:
        """Waits for pending messages, applies them, and removes all hooks from the model."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        if self._layers is not None:
            self._layers.close()
        self._communicator.close()
        self._exchange.close()

    @property
    def _decides(self) -> bool:
        """Whether this rank's dispatcher decides which messages start."""
        return self._schedule.agreement == "plan" or dist.get_rank(self._group) == 0

    def _make_communicator(self) -> Communicator:
        leader = self._schedule.agreement == "leader"
        if not leader and self._exchange.rounds == 1:
            return DirectCommunicator(self._launch, self._land)
        order_group = new_group_like(self._group, "order", backend="gloo") if leader else None
        cycle_ms = self._schedule.cycle_ms
        return ThreadedCommunicator(
            self._launch,
            self._land,
            order_group=order_group,
            has_arrived=self._has_arrived,
            tick=self._tick,
            cycle_s=None if cycle_ms is None else cycle_ms / 1e3,
            one_in_flight=self._schedule.one_in_flight,
        )

    def _watch_gradients(self) -> None:
        """Registers hooks where DistributedDataParallel's reducer has its own.

        They are called for the same backward passes, after all hooks of the parameter itself. A
        parameter that the job has frozen for a while takes its hook when it is trained again, and
        one that has moved to another type or device a new one.
        """
        for index, parameter in enumerate(self._parameters):
            if not parameter.requires_grad or (
                index in self._accumulators
                and self._places[index] == (parameter.dtype, parameter.device)
            ):
                continue
            self._places[index] = (parameter.dtype, parameter.device)
            with torch.enable_grad():
                view = parameter.view_as(parameter)
            assert view.grad_fn is not None
            accumulator = view.grad_fn.next_functions[0][0]
            assert accumulator is not None
            # Without a reference, the node ends with the backward pass, and its hook with it.
            self._accumulators[index] = accumulator
            self._hooks.append(
                accumulator.register_hook(functools.partial(self._gradient_ready, index, parameter))
            )
            if self.waits_by_layer:
                self._hooks.append(
                    accumulator.register_prehook(functools.partial(self._before_adding, index))
                )

    def _before_adding(self, index: int, _: object) -> None:
        """What a backward pass without a forward pass of its own adds is added to the average."""
        if not self._armed:
            self._settle([index])

    def _gradient_ready(self, index: int, parameter: nn.Parameter, *_: object) -> None:
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
        if self._timing is not None and step.plan is not None:
            self._timing.ready(index, gradient)
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
        if index in self._left_over:
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
                f"{len(missing)} parameters got no gradient in this step ({names}); "
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
                if self._schedule.one_in_flight:
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
        if not self.waits_by_layer:
            self._settle_all()
            return
        for index in step.unsettled:
            parameter = self._parameters[index]
            wait_when_read(parameter, functools.partial(self._settle, [index]))

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
        self._plan = step.plan = self._agree_on_plan(step, missing)
        self._exchange.prepare(self._plan.gradients)
        self._communicator.begin(step)
        if self._decides:
            step.dispatcher = self._schedule.dispatcher(self._plan)
            for index in step.arrived:
                if index in step.gradients:
                    with self._lock:
                        self._communicator.start(step, step.dispatcher.gradient_ready(index))

    def _agree_on_plan(self, step: StepInProgress, missing: list[int]) -> MessagePlan:
        # Those without a gradient come last, from the output layer on.
        order = [*step.arrived, *reversed(missing)]
        sparse = {*step.sparse_gradients, *self._sparse.intersection(missing)}
        uses = [-1] * len(self._parameters) if self._layers is None else self._layers.uses()
        plan_facts = torch.tensor(
            [order, uses, [int(i in sparse) for i in range(len(uses))]],
            dtype=torch.int64,
        ).to(self._parameters[0].device)
        dist.broadcast(plan_facts[:2], group=self._group, group_src=0)
        if self._find_unused:  # rank 0 may have no gradient of a parameter that is sparse elsewhere
            dist.all_reduce(plan_facts[2], op=dist.ReduceOp.MAX, group=self._group)
        order, uses, is_sparse = plan_facts.tolist()
        if self._layers is not None:
            self._layers.adopt()
        self._warn_about_sparse([index for index in order if is_sparse[index]])
        self._gradients = [self._describe(index, uses) for index in order if not is_sparse[index]]
        return self._schedule.plan(self._gradients)

    def _warn_about_sparse(self, indices: Sequence[int]) -> None:
        """Reports gradients to which the strategy does not apply."""
        if indices:
            report_restriction(
                self._spec,
                f"the gradients of {self._named(sorted(indices))} are sparse and are exchanged as "
                "such, one all_reduce each after backward; the strategy's codec and order do not "
                "apply to them",
            )

    def _named(self, indices: Sequence[int]) -> str:
        names = ", ".join(repr(self._names[index]) for index in indices[:_NAMED])
        return names + (f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else "")

    def _describe(self, index: int, uses: list[int]) -> Gradient:
        use = None if uses[index] < 0 else uses[index]
        return describe_gradient(index, self._names[index], self._parameters[index], use)

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

    def _settle_all(self) -> None:
        """As `settle`, recorded as one wait in the trace.

        The tracer sees the main thread's waits for single messages, but neither those of
        another thread nor what the exchange does between them.
        """
        if self._step.unsettled:
            with region("wait", "gradients"):
                self._wait(self._step.unsettled)
        self.settle()

    def _settle_layer(self, indices: list[int]) -> None:
        """Waits for a layer's parameters before its forward."""
        due = [index for index in indices if index in self._step.unsettled]
        if due:
            with region("wait", f"before {self._names[due[0]].rpartition('.')[0] or 'model'}"):
                self._wait(due)
            self._settle(due)

    def _wait(self, indices: Iterable[int]) -> None:
        step = self._step
        if step.plan is None:
            return
        due = [index for index in indices if index in step.gradients]
        self._communicator.wait(step, {n for index in due for n in step.plan.carriers[index]})

    def _settle_used(self, index: int) -> None:
        """Updates a parameter before it is used other than by its layer."""
        if self._in_forward:
            self._left_over.add(index)
        self._settle([index])

    def _settle(self, indices: Iterable[int]) -> None:
        """Waits for the averages of parameters and stores them, or updates the parameters."""
        with self._settling:  # a thread of the job may read parameters, too
            step = self._step
            due = [index for index in indices if index in step.unsettled]
            if due:
                self._settle_due(step, due)

    def _settle_due(self, step: StepInProgress, due: list[int]) -> None:
        self._wait(due)
        updates: dict[int, tuple[DeferredUpdate, list[tuple[nn.Parameter, torch.Tensor]]]] = {}
        for index in due:
            parameter = self._parameters[index]
            shown = wait_no_more(parameter)
            flight = step.sparse.pop(index, None)
            gradient = step.gradients.pop(index) if flight is None else flight.wait()
            step.unsettled.discard(index)
            update = self._deferred.pop(index, None)
            updated(parameter)
            if step.usage is not None and not step.usage.anywhere(index):
                continue
            if update is None or shown:
                set_gradient(parameter, gradient)
            if update is not None:
                updates.setdefault(id(update), (update, []))[1].append((parameter, gradient))
        for update, gradients in updates.values():
            with optimizer_phase():
                update.apply(gradients)


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
