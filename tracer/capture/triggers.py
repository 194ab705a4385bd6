"""Begins to record when a step is slow, or from time to time (``run --trigger``).

Rank 0 decides for all ranks: they wait for each other in every step, so a step that is slow on one
is slow on all of them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ddltrace.tracer.capture.job_order import Order
from ddltrace.tracer.trigger_expression import Trigger

_REMEMBERED: Final = 101
_LEAST: Final = 20
"""Steps without a trigger at first, of which there is no typical duration yet."""
_RENEWED: Final = 16
_REST_S: Final = 30.0
"""Least time between two orders because of slow steps."""


class Triggers:
    """Watches the steps of this rank.

    Args:
        triggers: When to record.
        order: Carries out an order on all ranks.
        fault: Called with errors.
    """

    def __init__(
        self,
        triggers: Sequence[Trigger],
        order: Callable[[Order], dict[str, Any]],
        fault: Callable[[str, Exception], None],
    ) -> None:
        self._order = order
        self._fault = fault
        self._slow = min(
            (t for t in triggers if t.factor is not None),
            key=lambda t: t.factor or 0.0,
            default=None,
        )
        self._periodic = [t for t in triggers if t.period_s is not None]
        self._durations: deque[int] = deque(maxlen=_REMEMBERED)
        self._until_renewal = _LEAST
        self._median_ns = 0.0
        self._limit_ns = float("inf")
        self._slow_step: tuple[int, int] | None = None
        self._rests_until = 0.0
        self._wake = threading.Event()
        self._stopping = False

    def start(self) -> None:
        """Starts the thread that gives the orders."""
        threading.Thread(target=self._run, name="ddltrace-trigger", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Gives no more orders."""
        del timeout_s
        self._stopping = True
        self._wake.set()

    def after_step(self, number: int, duration_ns: int) -> None:
        """Looks at a step that was not recorded, on the thread that trains.

        Args:
            number: Its index.
            duration_ns: Its duration.
        """
        if self._slow is None:
            return
        if duration_ns > self._limit_ns:
            self._slow_step = (number, duration_ns)
            self._wake.set()
        self._durations.append(duration_ns)
        self._until_renewal -= 1
        if not self._until_renewal:
            self._until_renewal = _RENEWED
            self._median_ns = statistics.median(self._durations)
            self._limit_ns = (self._slow.factor or 0.0) * self._median_ns

    def _run(self) -> None:
        try:
            due = [time.monotonic() + (t.period_s or 0.0) for t in self._periodic]
            while True:
                self._wake.wait(max(0.0, min(due) - time.monotonic()) if due else None)
                self._wake.clear()
                if self._stopping:
                    return
                order = self._slow_order()
                now = time.monotonic()
                for place, trigger in enumerate(self._periodic):
                    if due[place] <= now:
                        due[place] = now + (trigger.period_s or 0.0)
                        order = Order("on", trigger.steps, reason="by time")
                if order is not None:
                    self._order(order)
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._fault("trigger", error)

    def _slow_order(self) -> Order | None:
        slow_step, self._slow_step = self._slow_step, None
        if slow_step is None or self._slow is None or time.monotonic() < self._rests_until:
            return None
        self._rests_until = time.monotonic() + _REST_S
        number, duration_ns = slow_step
        times = duration_ns / self._median_ns
        reason = f"step {number} took {times:.1f} times the median"
        return Order("on", self._slow.steps, reason=reason)
