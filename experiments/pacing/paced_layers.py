"""Makes the layers of a model wait out the times of a profile.

Each layer still computes, on a small batch, so that gradients and losses are real. It sleeps for
the rest of its time, so that ranks that share a core do not slow each other. The time of hooks on
gradients, such as encoding, is added, as on a device.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import nn

from ddltrace.experiments.pacing.profile import PaceProfile

_BACKWARD_PER_FORWARD: Final = 2.0
"""A layer's backward pass computes two products of the size of its forward product."""


class PacedLayers:
    """Paces the innermost layers with parameters, in the order in which the model lists them."""

    def __init__(self, model: nn.Module, profile: PaceProfile) -> None:
        """Replaces the layers' forward functions.

        Args:
            profile: The times; those of another number of layers are resampled.
        """
        layers = [
            module
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        fitted = profile.for_layers(len(layers))
        sleeper = _Sleeper()
        backward = reversed(fitted.backward_us)
        for layer, forward_us, backward_us in zip(layers, fitted.forward_us, backward, strict=True):
            _pace(layer, forward_us / 1e6, backward_us / 1e6, sleeper)


class _Sleeper:
    """Sleeps; excess time of one sleep is subtracted from the next ones."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def sleep(self, seconds: float) -> None:
        wanted = seconds - self._ahead
        if wanted <= 0:
            self._ahead = max(0.0, -wanted)
            return
        begin = time.perf_counter()
        time.sleep(wanted)
        self._ahead = time.perf_counter() - begin - wanted


def _pace(layer: nn.Module, forward_s: float, backward_s: float, sleeper: _Sleeper) -> None:
    compute = layer.forward
    fastest = float("inf")

    def paced(*arguments: Any, **keywords: Any) -> Any:
        nonlocal fastest
        begin = time.perf_counter()
        output = compute(*arguments, **keywords)
        taken = time.perf_counter() - begin
        if not torch.is_grad_enabled():  # an evaluation is not part of the step
            return output
        fastest = min(fastest, taken)
        sleeper.sleep(forward_s - taken)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            wait = backward_s - _BACKWARD_PER_FORWARD * fastest
            return _WaitInBackward.apply(output, wait, sleeper)  # type: ignore[no-untyped-call]
        return output

    layer.forward = paced


class _WaitInBackward(torch.autograd.Function):
    """The identity, whose backward pass sleeps before the layer's own begins."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, seconds: float, sleeper: _Sleeper) -> Any:
        """Returns the output as it is."""
        context.seconds = seconds
        context.sleeper = sleeper
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Sleeps, then returns the gradient as it is."""
        context.sleeper.sleep(context.seconds)
        return gradient, None, None
