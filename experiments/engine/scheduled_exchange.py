"""Executes the message plan of any schedule with one all-reduce a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddltrace.experiments.engine.deferred_update import DeferredUpdate
from ddltrace.experiments.engine.exchange import Exchange
from ddltrace.experiments.schedules.base import Dispatcher, Schedule
from ddltrace.experiments.strategy.message_plan import Gradient, Message, MessagePlan


@dataclass
class _InFlight:
    """A message that has started: `payload` is what is averaged in place."""

    message: Message
    payload: torch.Tensor
    is_packed: bool
    work: dist.Work


class ScheduledExchange(Exchange):
    """Sends gradients as a schedule says, from the hooks of the parameters.

    The ranks' gradients may become ready in different orders, but all ranks must start their
    collectives in one order. In the first step nothing starts before backward has ended; then
    rank 0 tells the others the order in which its gradients came, and the plan is made of
    that, once and for all.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        optimizer: Optimizer,
        *,
        find_unused_parameters: bool,
    ) -> None:
        self.model = model
        self._schedule = schedule
        self._find_unused = find_unused_parameters
        self._update = DeferredUpdate(optimizer) if schedule.wait == "layer" else None
        self._share = 1.0 / dist.get_world_size()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._plan: MessagePlan | None = None
        self._dispatcher: Dispatcher | None = None
        # Of the step that is under way, by the parameter's index:
        self._arrived: dict[int, None] = {}  # a set that keeps its order
        self._gradients: dict[int, torch.Tensor] = {}  # what is averaged, zeros if missing
        self._unsettled: set[int] = set()  # sent, and not yet where it belongs
        self._usage: _Usage | None = None
        self._flights: dict[int, _InFlight] = {}  # by the message's number
        self._buffers: dict[int, torch.Tensor] = {}
        _broadcast([*model.parameters(), *model.buffers()])
        self._hooks: list[RemovableHandle] = []
        self._watch_gradients()
        self._waiting_points = self._watch_layers() if self._update else []

    def finish(self) -> None:
        """Starts what is left, then waits for everything, unless the layers do that.

        Raises:
            RuntimeError: A parameter got no gradient and `find_unused_parameters` is off.
        """
        self._settle(list(self._unsettled))  # parameters that no forward came to
        missing = [i for i in range(len(self._parameters)) if i not in self._arrived]
        if missing and not self._find_unused:
            names = ", ".join(repr(self._names[i]) for i in missing[:5])
            raise RuntimeError(
                f"{len(missing)} parameters got no gradient in this step ({names}); "
                "attach with find_unused_parameters=True"
            )
        if self._plan is None:
            self._plan = self._agree_on_plan(missing)
            self._dispatcher = self._schedule.dispatcher(self._plan)
            # Hooks run in the order in which they were registered. From now on ours send
            # gradients away and change them: others' must have seen them before.
            self._watch_gradients()
            for index in self._arrived:
                self._start(self._dispatcher.gradient_ready(index))
        assert self._dispatcher is not None
        for index in missing:
            self._gradients[index] = torch.zeros_like(self._parameters[index])
        self._start(self._dispatcher.backward_ended())
        if self._find_unused:
            self._usage = _Usage(self._parameters, self._arrived)
        self._dispatcher = self._schedule.dispatcher(self._plan)
        self._arrived.clear()
        self._unsettled = set(self._gradients)
        if self._update is None:
            self._settle(range(len(self._parameters)))
        else:
            self._update.remember_settings()
            for parameter in self._parameters:
                parameter.grad = None

    def close(self) -> None:
        """Waits for what is under way, applies it, and takes all hooks off the model."""
        self._settle(list(self._unsettled))
        for hook in (*self._hooks, *self._waiting_points):
            hook.remove()

    def _watch_gradients(self) -> None:
        """Registers this exchange's hooks, behind all that are there by now."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]

    def _watch_layers(self) -> list[RemovableHandle]:
        """Makes every layer wait for its own parameters before its forward."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        handles = []
        for module in self.model.modules():
            own = [
                index_of[id(parameter)]
                for parameter in module.parameters(recurse=False)
                if id(parameter) in index_of
            ]
            if own:
                handles.append(module.register_forward_pre_hook(self._layer_hook(own)))
        return handles

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_ready(parameter: torch.Tensor) -> None:
            self._check_arrival(index, parameter)
            assert parameter.grad is not None
            self._arrived[index] = None
            self._gradients[index] = parameter.grad
            if self._dispatcher is not None:
                self._start(self._dispatcher.gradient_ready(index))

        return gradient_ready

    def _layer_hook(self, own: list[int]) -> Callable[[nn.Module, object], None]:
        def wait_for_own(_: nn.Module, __: object) -> None:
            self._settle(own)

        return wait_for_own

    def _check_arrival(self, index: int, parameter: torch.Tensor) -> None:
        name = self._names[index]
        if index in self._arrived:
            raise RuntimeError(
                f"parameter {name!r} got a second gradient in one step: "
                "call finish() after every backward pass"
            )
        if index in self._unsettled:
            raise RuntimeError(
                f"parameter {name!r} was used outside the forward of its own layer, before its "
                "last update: a schedule that waits before the layers cannot train this model"
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError(
                f"parameter {name!r} has a sparse gradient, "
                "which the experiments' engine cannot exchange"
            )

    def _agree_on_plan(self, missing: list[int]) -> MessagePlan:
        # Those without a gradient come last, from the output layer on.
        order = torch.tensor([*self._arrived, *reversed(missing)], dtype=torch.int64)
        order = order.to(self._parameters[0].device)
        dist.broadcast(order, src=0)
        return self._schedule.plan([self._describe(int(index)) for index in order])

    def _describe(self, index: int) -> Gradient:
        parameter = self._parameters[index]
        return Gradient(
            index=index,
            name=self._names[index],
            elements=parameter.numel(),
            element_bytes=parameter.element_size(),
            dtype=str(parameter.dtype).removeprefix("torch."),
            shape=tuple(parameter.shape),
        )

    @torch.no_grad()
    def _start(self, messages: Iterable[Message]) -> None:
        for message in messages:
            view = self._view(message)
            payload = self._pack(message) if view is None else view.mul_(self._share)
            work = dist.all_reduce(payload, async_op=True)
            assert work is not None
            self._flights[message.number] = _InFlight(message, payload, view is None, work)

    def _view(self, message: Message) -> torch.Tensor | None:
        """The part of a gradient that a message carries, if it lies in one piece of memory."""
        if len(message.slices) != 1:
            return None
        (part,) = message.slices
        gradient = self._gradients[part.gradient]
        return gradient.view(-1)[part.start : part.stop] if gradient.is_contiguous() else None

    def _pack(self, message: Message) -> torch.Tensor:
        """A buffer with this rank's share of everything that a message carries."""
        buffer = self._buffers.get(message.number)
        if buffer is None:
            like = self._gradients[message.slices[0].gradient]
            buffer = torch.empty(message.elements, dtype=like.dtype, device=like.device)
            self._buffers[message.number] = buffer
        at = 0
        for part in message.slices:
            flat = self._gradients[part.gradient].reshape(-1)[part.start : part.stop]
            torch.mul(flat, self._share, out=buffer[at : at + part.elements])
            at += part.elements
        return buffer

    def _settle(self, indices: Iterable[int]) -> None:
        """Waits for the averages of parameters and puts them where they belong."""
        due = [index for index in indices if index in self._unsettled]
        if not due:
            return
        assert self._plan is not None
        for number in sorted({n for index in due for n in self._plan.carriers[index]}):
            if (flight := self._flights.pop(number, None)) is not None:
                flight.work.wait()
                if flight.is_packed:
                    self._unpack(flight)
        averaged = [
            (self._parameters[index], self._gradients[index])
            for index in due
            if self._usage is None or self._usage.anywhere(index)
        ]
        if self._update is None:
            for parameter, gradient in averaged:
                parameter.grad = gradient
        else:
            self._update.apply(averaged)
        for index in due:
            self._unsettled.discard(index)
            del self._gradients[index]

    @torch.no_grad()
    def _unpack(self, flight: _InFlight) -> None:
        at = 0
        for part in flight.message.slices:
            target = self._gradients[part.gradient]
            source = flight.payload[at : at + part.elements]
            if target.is_contiguous():
                target.view(-1)[part.start : part.stop] = source
            else:
                # Elements of a flattened strided gradient have no view: copy by way of one.
                flat = target.reshape(-1)
                flat[part.start : part.stop] = source
                target.copy_(flat.view_as(target))
            at += part.elements


class _Usage:
    """Which parameters got a gradient on any rank: one all-reduce, awaited when asked."""

    def __init__(self, parameters: Sequence[torch.Tensor], arrived: Iterable[int]) -> None:
        counts = torch.zeros(len(parameters), dtype=torch.int32)
        counts[list(arrived)] = 1
        self._counts = counts.to(parameters[0].device)
        self._work = dist.all_reduce(self._counts, async_op=True)
        self._found: list[int] | None = None

    def anywhere(self, index: int) -> bool:
        """Whether some rank used the parameter in this step."""
        if self._found is None:
            assert self._work is not None
            self._work.wait()
            self._found = self._counts.tolist()
        return self._found[index] > 0


@torch.no_grad()
def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
