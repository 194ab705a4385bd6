"""Counts the steps of a training by its optimizers' updates, as the trace does."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer


class StepCount:
    """Counts steps. A new one begins when an optimizer updates that has updated in this one.

    A step thus has the updates of all optimizers of a job with several models, and a later phase of
    a job may have other optimizers.
    """

    def __init__(self) -> None:
        self._updated: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether an update begins a step. To be called once an update.

        Args:
            optimizer: The optimizer that updates.
        """
        begins = not self._updated or optimizer in self._updated
        if begins:
            self._updated.clear()
        self._updated.add(optimizer)
        return begins
