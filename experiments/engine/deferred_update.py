"""Updates parameters one by one, after the optimizer's step has been called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class DeferredUpdate:
    """Applies an optimizer's step to some parameters, as it would have been at a past call.

    The job goes on calling ``optimizer.step()`` once a step: with the gradients taken away it
    updates nothing, but schedulers and observers see the step where it is. The updates
    themselves go around the step's hooks, else each layer's would count as a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._remembered: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}

    def remember_settings(self) -> None:
        """Keeps the learning rate and the like: they may change before the update runs."""
        groups = self._optimizer.param_groups
        self._remembered = [_settings(group) for group in groups]
        self._group_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}

    def apply(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Updates parameters with their gradients, and nothing else.

        Args:
            gradients: Parameters with what their gradients are; they have none afterwards.
        """
        due = {id(parameter): (parameter, gradient) for parameter, gradient in gradients}
        for parameter, gradient in due.values():
            parameter.grad = gradient
        groups = self._optimizer.param_groups
        present = [dict(group) for group in groups]
        for group, settings in zip(groups, self._remembered, strict=True):
            group.update(settings)
            group["params"] = []
        for key, (parameter, _) in due.items():
            if key in self._group_of:
                groups[self._group_of[key]]["params"].append(parameter)
        hooked = type(self._optimizer).step
        getattr(hooked, "__wrapped__", hooked)(self._optimizer)
        for group, settings in zip(groups, present, strict=True):
            group.update(settings)
        for parameter, _ in due.values():
            parameter.grad = None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
