"""Tells when backward has computed a part of a parameter's gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class GradientHooks:
    """Hooks where DistributedDataParallel's reducer has its own.

    They are called for the same backward passes, after all hooks of the parameter itself.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ready: Callable[[int], None],
        before_adding: Callable[[int], None] | None = None,
    ) -> None:
        """Registers the hooks.

        Args:
            parameters: The parameters.
            ready: Called with the index of a parameter whose gradient has got a part.
            before_adding: Called before that, with the gradient as it was; None for nothing.
        """
        self._parameters = parameters
        self._ready = ready
        self._before_adding = before_adding
        self._hooks: list[RemovableHandle] = []
        self._accumulators: dict[int, Any] = {}
        self._places: dict[int, tuple[torch.dtype, torch.device]] = {}
        self.renew()

    def renew(self) -> None:
        """Registers the hooks that are missing.

        A parameter that the job has frozen for a while takes its hook when it is trained again, and
        one that has moved to another type or device a new one.
        """
        for index, parameter in enumerate(self._parameters):
            place = (parameter.dtype, parameter.device)
            if not parameter.requires_grad or self._places.get(index) == place:
                continue
            self._places[index] = place
            with torch.enable_grad():
                view = parameter.view_as(parameter)
            assert view.grad_fn is not None
            accumulator = view.grad_fn.next_functions[0][0]
            assert accumulator is not None
            # Without a reference, the node ends with the backward pass, and its hook with it.
            self._accumulators[index] = accumulator
            self._hooks.append(
                accumulator.register_hook(functools.partial(_call, self._ready, index))
            )
            if self._before_adding is not None:
                self._hooks.append(
                    accumulator.register_prehook(
                        functools.partial(_call, self._before_adding, index)
                    )
                )

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


def _call(function: Callable[[int], None], index: int, *gradients: object) -> None:
    del gradients  # a hook that returns None leaves them as they are
    function(index)
