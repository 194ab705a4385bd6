"""Counts the steps of a training: those of its trace."""

from __future__ import annotations

from ddltrace.experiments.messages.trace_marks import current_session
from ddltrace.tracer.errors import MissingCapabilityError


class StepCount:
    """Finds the updates with which the steps of the trace begin to end.

    A step of the trace has the updates of all optimizers that step one after the other, with no
    training between them (`ddltrace.tracer.record.step_tracker`).
    """

    def __init__(self) -> None:
        """Counts the steps of this process.

        Raises:
            MissingCapabilityError: This process is not recorded.
        """
        session = current_session()
        if session is None:
            raise MissingCapabilityError(
                "steps are counted by the trace, and this process is not recorded"
            )
        self._steps = session.context.steps
        self._last = -1

    def is_first_update(self) -> bool:
        """Whether the update that has just ended is the first one of its step.

        To be called after every update, by a hook that was registered after the tracer's.
        """
        number: int = self._steps.number
        is_first = number != self._last
        self._last = number
        return is_first
