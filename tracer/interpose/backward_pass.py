"""The state of the backward pass that runs, which several patches share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.timing.device_clock import Mark


class BackwardPass:
    """The state of the backward pass that runs.

    Attributes:
        depth: How many engine calls are nested; checkpointing calls backward in backward.
        started: Number of outermost backward passes so far.
        last_gradient_ns: When the newest gradient became ready, of those that Python has seen.
        bucket_messages: Messages that DDP's reducer launched in this pass and waits for at
            its end, of those that Python recorded.
        device_mark: Where the device's work for the next gradient begins; None if it is not timed.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.started = 0
        self.last_gradient_ns = 0
        self.bucket_messages = 0
        self.device_mark: Mark | None = None
