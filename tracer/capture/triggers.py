"""Begins to record when a step is slow, a rank is late, or from time to time (``run --trigger``).

Rank 0 decides for all ranks: they wait for each other in every step, so a step that is slow on one
is slow on all of them. Which rank they wait for cannot be seen while nothing is recorded: a few
steps are recorded from time to time to see it, as messages only.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ddltrace.tracer.capture.job_order import Order
from ddltrace.tracer.capture.late_rank import LOOK, STEPS, find_late_rank
from ddltrace.tracer.trigger_expression import Trigger

_REMEMBERED: Final = 101
_LEAST: Final = 20
"""Steps without a trigger at first, of which there is no typical duration yet."""
_RENEWED: Final = 16
_REST_S: Final = 30.0
"""Least time between two orders because of slow steps."""
_SETTLE_S: Final = 2.0
"""Time in which the messages of the last steps are written."""


class Triggers:
    """Watches the steps of this rank.

    Args:
        triggers: When to record.
        order: Carries out an order on all ranks.
        ask: Sends a request to all ranks and returns their answers, by rank.
        fault: Called with errors.
    """

    def __init__(
        self,
        triggers: Sequence[Trigger],
        order: Callable[[Order], dict[str, Any]],
        ask: Callable[[dict[str, Any]], dict[int, dict[str, Any]]],
        fault: Callable[[str, Exception], None],
    ) -> None:
        self._order = order
        self._ask = ask
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
        self._off = threading.Event()
        self._off_from = 0
        self._late_before: int | None = None
        self._wake = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Starts the thread that gives the orders."""
        threading.Thread(target=self._run, name="ddltrace-trigger", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Gives no more orders."""
        del timeout_s
        self._stopped.set()
        self._wake.set()

    def after_step(self, number: int, duration_ns: int) -> None:
        """Looks at a step that was not recorded, on the thread that trains.

        Args:
            number: Its index.
        """
        if not self._off.is_set() and number >= self._off_from:
            self._off.set()
            self._wake.set()
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
                if self._stopped.is_set():
                    return
                order = self._slow_order()
                now = time.monotonic()
                for place, trigger in enumerate(self._periodic):
                    if due[place] <= now:
                        due[place] = now + (trigger.period_s or 0.0)
                        if trigger.late_ms is None:
                            order = Order("on", trigger.steps, reason="by time")
                        else:
                            order = self._look(trigger.late_ms, trigger.steps) or order
                if order is not None:
                    self._give(order)
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._fault("trigger", error)

    def _give(self, order: Order) -> int | None:
        """Gives an order to record; returns the first step that it is for, if any rank follows."""
        first: int | None = self._order(order).get("step")
        if first is not None:
            self._off_from = first + (order.steps or 0)
            self._off.clear()
        return first

    def _look(self, late_ms: float, steps: int) -> Order | None:
        """Records some steps, and gives an order if a rank is late that was not late before."""
        if not self._off.is_set():
            return None  # all is recorded, or nothing trains
        first = self._give(Order("on", STEPS, level="comm", reason=LOOK))
        if first is None:
            return None
        while not self._off.is_set() and not self._stopped.is_set():
            self._wake.wait()
            self._wake.clear()
        if self._stopped.wait(_SETTLE_S):
            return None
        self._wake.set()  # a step may have been slow meanwhile
        times = {rank: answer["times"] for rank, answer in self._ask({"do": "times"}).items()}
        before, self._late_before = self._late_before, None
        found = find_late_rank(times, late_ms * 1e6)
        if found is None:
            return None
        self._late_before, late_ns = found
        if self._late_before == before:
            return None
        reason = f"rank {found[0]} was late by {late_ns / 1e6:.1f} ms in most of the steps "
        return Order("on", steps, reason=f"{reason}{first + 1} to {first + STEPS - 1}")

    def _slow_order(self) -> Order | None:
        slow_step, self._slow_step = self._slow_step, None
        if slow_step is None or self._slow is None or time.monotonic() < self._rests_until:
            return None
        self._rests_until = time.monotonic() + _REST_S
        number, duration_ns = slow_step
        times = duration_ns / self._median_ns
        reason = f"step {number} took {times:.1f} times the median"
        return Order("on", self._slow.steps, reason=reason)
