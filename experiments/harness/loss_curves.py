"""Determines when a training reached a loss, from smoothed losses of batches over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SMOOTHING: Final = 5
"""Number of steps over which losses are averaged, because the loss of one batch is noisy."""


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """Mean of each step's loss and the losses of the four steps before it.

    None where fewer than `SMOOTHING` steps have been trained or one of them diverged.
    """
    means: list[float | None] = []
    for end in range(1, len(losses) + 1):
        window = [loss for loss in losses[max(0, end - SMOOTHING) : end] if loss is not None]
        means.append(sum(window) / SMOOTHING if len(window) == SMOOTHING else None)
    return means


def time_to_loss(
    losses: Sequence[float | None], elapsed_us: Sequence[float], target: float
) -> float | None:
    """Time from the start of the first step until the smoothed loss is at most `target`.

    Args:
        losses: Loss of each step, warm-up included.
        elapsed_us: End of each step, microseconds from the start of the first one.
        target: The loss to reach.

    Returns:
        Microseconds; None if the loss was not reached, or the steps are not known.
    """
    if len(losses) != len(elapsed_us):
        return None
    for loss, end in zip(smoothed(losses), elapsed_us, strict=True):
        if loss is not None and loss <= target:
            return end
    return None
