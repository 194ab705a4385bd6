"""Tracks which parameters' gradients are ready."""

from __future__ import annotations


class ReadyGradients:
    """Ids of parameters whose gradients are ready, in the order in which they became ready.

    Attributes:
        latest: Since the last look-up, or since the step began.
        in_backward: Since the backward pass began.
        trained: All ids that ever had a gradient.
    """

    def __init__(self) -> None:
        self.latest: list[int] = []
        self.in_backward: list[int] = []
        self.trained: set[int] = set()
