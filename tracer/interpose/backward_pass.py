"""The state of the current backward pass, shared by several patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class HookedParameter:
    """A parameter whose gradient is recorded by a hook in Python.

    It holds no reference to the parameter, not even a weak one: see `swaps.py`.

    Attributes:
        hook: What is called when its gradient is ready.
        handle: Removes the hook; None while it is not registered.
    """

    hook: Callable[[torch.Tensor], None]
    handle: Any = None


class BackwardPass:
    """The state of the current backward pass.

    Attributes:
        depth: Number of nested engine calls; checkpointing calls backward inside backward.
        started: Number of outermost backward passes so far.
        last_gradient_ns: When the newest gradient that Python recorded became ready.
        bucket_messages: Messages recorded by Python that DDP's reducer launched in this pass and
            waits for at its end.
        on_device: Whether the device's work for gradients is timed in this pass.
        hooked: The parameters whose gradients are recorded in Python, by id.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.started = 0
        self.last_gradient_ns = 0
        self.bucket_messages = 0
        self.on_device = False
        self.hooked: dict[int, HookedParameter] = {}
