"""Makes a rank compute more slowly: its forward pass ends with a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddltrace.experiments.messages.trace_marks import region


class Straggler:
    """Waits so that a step computes a given number of times as long as it would.

    Computation is measured in each step, from its beginning until its last gradient is ready,
    without the wait itself; a step waits by what the step before it took. Waits for messages come
    after the last gradient and do not count.
    """

    def __init__(self, model: nn.Module, factor_of: Callable[[int], float]) -> None:
        """Registers hooks.

        Args:
            model: What computes.
            factor_of: How many times as long a step computes, by its number from 0.
        """
        self._factor_of = factor_of
        self._computed = 0.0
        self._begun = self._last = time.monotonic()
        self._waited = 0.0
        self._step: int | None = None
        model.register_forward_hook(self._forward_ended)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._gradient_ready
                )

    def begin(self, step: int) -> None:
        """To be called when a training step begins."""
        self._computed = max(0.0, self._last - self._begun - self._waited)
        self._begun = self._last = time.monotonic()
        self._waited = 0.0
        self._step = step

    def _forward_ended(self, *_: Any) -> None:
        if self._step is None or not torch.is_grad_enabled():
            return  # an evaluation, or a further forward pass of the step
        factor, self._step = self._factor_of(self._step), None
        self._waited = (factor - 1.0) * self._computed
        if self._waited > 0.0:
            with region("marker", f"slowed by --slow: computes {factor:g} times as long"):
                time.sleep(self._waited)

    def _gradient_ready(self, _: Any) -> None:
        self._last = time.monotonic()
