"""Updates parameters one by one, after the optimizer's step has been called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.engine.parameter_access import set_gradient
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule


class DeferredUpdate:
    """Applies an optimizer's step to some parameters, as it would have been at a past call.

    The job goes on calling ``optimizer.step()`` once a step: with the gradients taken away it
    updates nothing, but schedulers and observers see the step where it is. The updates
    themselves go around the step's hooks, else each layer's would count as a step.
    """

    def __init__(self, optimizer: Optimizer, rule: OptimizerRule | None = None) -> None:
        """Makes it.

        Args:
            optimizer: The job's optimizer.
            rule: What updates parameters in place of the optimizer, if anything does.
        """
        self.optimizer = optimizer
        self._rule = rule
        self._remembered: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}

    def remember_settings(self) -> None:
        """Keeps the learning rate and the like: they may change before the update runs."""
        groups = self.optimizer.param_groups
        self._remembered = [_settings(group) for group in groups]
        self._group_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}

    def apply(self, gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Updates parameters with their gradients, and nothing else.

        Args:
            gradients: Parameters with what their gradients are; they have none afterwards.
        """
        due = {id(parameter): (parameter, gradient) for parameter, gradient in gradients}
        for parameter, gradient in due.values():
            set_gradient(parameter, gradient)
        groups = self.optimizer.param_groups
        present = [dict(group) for group in groups]
        for group, settings in zip(groups, self._remembered, strict=True):
            group.update(settings)
            group["params"] = []
        for key, (parameter, _) in due.items():
            if key in self._group_of:
                groups[self._group_of[key]]["params"].append(parameter)
        self._step()
        for group, settings in zip(groups, present, strict=True):
            group.update(settings)
        for parameter, _ in due.values():
            set_gradient(parameter, None)

    def _step(self) -> None:
        if self._rule is not None:
            update_by_rule(self._rule, self.optimizer)
            return
        hooked = type(self.optimizer).step
        getattr(hooked, "__wrapped__", hooked)(self.optimizer)


@torch.no_grad()
def update_by_rule(rule: OptimizerRule, optimizer: Optimizer) -> None:
    """Lets a rule update all parameters of an optimizer that have a gradient."""
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            rule.update(optimizer, group, parameters)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
