"""The state of the current backward pass, shared by several patches."""

from __future__ import annotations


class BackwardPass:
    """The state of the current backward pass.

    Attributes:
        depth: Number of nested engine calls; checkpointing calls backward inside backward.
        started: Number of outermost backward passes so far.
        last_gradient_ns: When the newest gradient that Python recorded became ready.
        bucket_messages: Messages recorded by Python that DDP's reducer launched in this pass and
            waits for at its end.
        on_device: Whether the device's work for gradients is timed in this pass.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.started = 0
        self.last_gradient_ns = 0
        self.bucket_messages = 0
        self.on_device = False
