"""Updates parameters one by one, after the optimizer's step has been called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.engine.parameter_access import raw_gradient, set_gradient
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule


class DeferredUpdate:
    """Applies an optimizer's step to some parameters, with the settings of an earlier call.

    The job still calls ``optimizer.step()`` once per step. Without gradients, the call updates
    nothing, but schedulers and observers see the step. The updates bypass the step's hooks;
    otherwise each layer's update would count as a step.
    """

    def __init__(self, optimizer: Optimizer, rule: OptimizerRule | None = None) -> None:
        """Creates the update.

        Args:
            optimizer: The job's optimizer.
            rule: Rule that updates parameters in place of the optimizer; None for the optimizer
                itself.
        """
        self.optimizer = optimizer
        self._rule = rule
        self._remembered: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}

    def remember_settings(self) -> None:
        """Stores settings such as the learning rate, which may change before the update runs."""
        groups = self.optimizer.param_groups
        self._remembered = [_settings(group) for group in groups]
        self._group_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}

    def apply(self, gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Updates only the given parameters.

        Args:
            gradients: Parameters with their gradients. Gradients that they have by now, of a
                later step, stay.
        """
        due = {id(parameter): (parameter, gradient) for parameter, gradient in gradients}
        later = {key: raw_gradient(parameter) for key, (parameter, _) in due.items()}
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
        for key, (parameter, _) in due.items():
            set_gradient(parameter, later[key])

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
