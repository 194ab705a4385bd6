"""The job's optimizer, on a server: it updates the server's keys with what workers push."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ddltrace.experiments.asynchrony.wire_format import KeyState

OPTIMIZERS: Final = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"),
)
"""Optimizers that update each element by itself, so that parts of tensors can be apart."""

_NOT_SETTINGS: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group of a job's optimizer, as JSON can hold them."""
    known = inspect.signature(type(optimizer)).parameters.keys() - _NOT_SETTINGS
    return [
        {key: _plain(value) for key, value in group.items() if key in known}
        for group in optimizer.param_groups
    ]


class ServerOptimizer:
    """Updates some flat tensors, each as part of one of the job's parameter groups."""

    def __init__(
        self,
        name: str,
        settings: Sequence[dict[str, Any]],
        values: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        rate_factor: float,
    ) -> None:
        """Makes the optimizer.

        Args:
            name: One of `OPTIMIZERS`.
            settings: From `settings_of`.
            values: Flat tensors to update in place.
            groups: For each value, the number of its parameter group.
            rate_factor: Factor of the learning rate: a push of one of p workers is an update of 1 /
                p.
        """
        self._values = values
        self._rate_factor = rate_factor
        of_group: list[list[torch.Tensor]] = [[] for _ in settings]
        for value, group in zip(values, groups, strict=True):
            if group >= 0:
                of_group[group].append(value)
        self._used = [number for number, members in enumerate(of_group) if members]
        kind: Any = getattr(torch.optim, name)
        self._optimizer: Optimizer | None = None
        if self._used:
            self._optimizer = kind(
                [{"params": of_group[n], **self._scaled(settings[n])} for n in self._used]
            )
        # Around the hooks of a step: to a tracer, a push is not a step of this process.
        self._step: Any = getattr(kind.step, "__wrapped__", kind.step)

    def set(self, settings: Sequence[dict[str, Any]]) -> None:
        """Takes new settings, such as another learning rate."""
        if self._optimizer is not None:
            for group, number in zip(self._optimizer.param_groups, self._used, strict=True):
                group.update(self._scaled(settings[number]))

    def state(self) -> list[KeyState]:
        """The state of each value; empty where there is none yet."""
        own = {} if self._optimizer is None else self._optimizer.state
        return [
            {
                name: torch.as_tensor(entry)
                for name, entry in own[value].items()
                if entry is not None
            }
            if value in own
            else {}
            for value in self._values
        ]

    def load(self, states: Sequence[KeyState]) -> None:
        """Takes over the state of each value, as `state` returns it."""
        if self._optimizer is not None:
            for value, state in zip(self._values, states, strict=True):
                if state:
                    self._optimizer.state[value] = dict(state)

    def update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step.

        Args:
            gradients: Gradient of each value; None leaves the value unchanged.
        """
        if self._optimizer is None:
            return
        for value, gradient in zip(self._values, gradients, strict=True):
            value.grad = gradient
        self._step(self._optimizer)

    def _scaled(self, settings: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in settings.items()
        }
        if "lr" in values:
            values["lr"] *= self._rate_factor
        return values


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
