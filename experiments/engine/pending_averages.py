"""Stores averages in parameters, and runs updates that wait for them, when they are needed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

from ddltrace.experiments.engine.communicators import Communicator
from ddltrace.experiments.engine.deferred_update import DeferredUpdate
from ddltrace.experiments.engine.parameter_access import (
    raw_gradient,
    set_gradient,
    sharing_memory,
    update_when_used,
    updated,
    wait_no_more,
    wait_when_read,
)
from ddltrace.experiments.engine.step_in_progress import StepInProgress
from ddltrace.experiments.messages.trace_marks import optimizer_phase, region
from ddltrace.experiments.observation.notes import report_restriction

_NAMED: Final = 5
"""Maximum number of parameters named in a message to the user."""


class PendingAverages:
    """Gradients of a step that are in flight after backward, and updates that are due.

    A parameter's average is stored, or its update runs, before its layer's next forward pass, or
    when the job reads the gradient or uses the parameter before.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        spec: str,
        communicator: Communicator | None = None,
    ) -> None:
        """Begins with nothing pending.

        Args:
            parameters: The trainable parameters with their names.
            spec: The strategy's spec, for messages to the user.
            communicator: Waits for messages; None if nothing will ever be pending.
        """
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._spec = spec
        self._step = StepInProgress(None, None)
        self._communicator = communicator
        self._deferred: dict[int, DeferredUpdate] = {}
        self._left_over: set[int] = set()
        self._in_forward = False
        self._settling = threading.RLock()

    def begin_forward(self) -> None:
        """To be called before a forward pass whose backward pass synchronizes gradients."""
        self._in_forward = True
        self._left_over.clear()

    def end_forward(self) -> None:
        """To be called after it: settles, as one wait in the trace, what no layer waited for."""
        self._in_forward = False
        # It was not used in this forward pass, or used unawares.
        self._left_over.update(self._deferred)
        self.settle_all()

    def used_before_update(self, index: int) -> bool:
        """Whether the last forward pass has used a parameter outside its layer's own forward."""
        return index in self._left_over

    def begin(self, step: StepInProgress) -> None:
        """Follows another step; of the one before nothing is pending."""
        self._step = step

    def wait_when_read(self) -> None:
        """Lets the job wait for each average when it reads the gradient."""
        for index in self._step.unsettled:
            self._wait_when_read(index)

    def defer(self, update: DeferredUpdate) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Takes gradients in flight from an optimizer that steps now.

        Args:
            update: Updates each of its parameters when the parameter's layer needs it, or when
                anything else uses the parameter.

        Returns:
            The parameters with their gradients, for `show`.
        """
        # A step without a backward pass of its own uses the same averages again.
        self.settle(list(self._deferred))
        own = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
        due = {i: p for i in self._step.unsettled if id(p := self._parameters[i]) in own}
        if not due:
            return []
        shared = sharing_memory(due, self._parameters)
        if shared:
            report_restriction(
                self._spec,
                f"{named(self._names, sorted(shared))} share memory with other tensors of the job, "
                "such as views that it has kept, and are updated in the optimizer's step, not in "
                "the next forward pass",
            )
            self.settle(shared)
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
            if raw_gradient(self._parameters[index]) is not None:
                self._wait_when_read(index)

    def settle_all(self) -> None:
        """Waits for all averages and stores them; recorded as one wait in the trace.

        The tracer sees the main thread's waits for single messages, but neither those of
        another thread nor what the exchange does between them.
        """
        if self._step.unsettled:
            with region("wait", "gradients"):
                self._wait(self._step.unsettled)
        self.settle()

    def settle_layer(self, indices: list[int]) -> None:
        """Waits for a layer's parameters before its forward."""
        due = [index for index in indices if index in self._step.unsettled]
        if due:
            with region("wait", f"before {self._names[due[0]].rpartition('.')[0] or 'model'}"):
                self._wait(due)
            self.settle(due)

    def settle(self, indices: Iterable[int] | None = None) -> None:
        """Waits for the averages of parameters and stores them, or updates the parameters.

        Args:
            indices: Of the parameters; None for all.
        """
        with self._settling:  # a thread of the job may read parameters, too
            step = self._step
            wanted = step.unsettled if indices is None else indices
            due = [index for index in wanted if index in step.unsettled]
            if due:
                self._settle_due(step, due)

    def _wait_when_read(self, index: int) -> None:
        wait_when_read(self._parameters[index], functools.partial(self.settle, [index]))

    def _settle_used(self, index: int) -> None:
        """Updates a parameter before it is used other than by its layer."""
        if self._in_forward:
            self._left_over.add(index)
        self.settle([index])

    def _wait(self, indices: Iterable[int]) -> None:
        step = self._step
        if step.plan is None:
            return
        assert self._communicator is not None
        due = [index for index in indices if index in step.gradients]
        self._communicator.wait(step, {n for index in due for n in step.plan.carriers[index]})

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


def named(names: Sequence[str], indices: Sequence[int]) -> str:
    """The first few names of parameters, for a message to the user."""
    first = ", ".join(repr(names[index]) for index in indices[:_NAMED])
    return first + (f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else "")
