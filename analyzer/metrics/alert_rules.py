"""Alerts: limits that a job passes for some steps, dead ranks and hangs."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.metrics.readings import Readings
from ddltrace.tracer.alert_expression import Limit

_ACTION_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Raised:
    """An alert.

    Attributes:
        rule: The expression, or ``dead``, ``hang`` or ``silent``.
        text: One line.
        step: The number of completed steps.
        value: The value of the quantity; None without one.
    """

    rule: str
    text: str
    step: int
    value: float | None = None


class AlertRules:
    """Compares readings with limits; an alert is raised once, until its limit is kept again."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self._since: dict[Limit, int] = {}
        self._raised: set[object] = set()

    def check(self, readings: Readings) -> list[Raised]:
        """The alerts that the newest readings raise.

        Args:
            readings: The readings; those without quantities change nothing.
        """
        new = [self._limit(limit, readings) for limit in self._limits if readings.quantities]
        now = {(alert.kind, alert.ranks): alert for alert in readings.alerts}
        for key in [key for key in self._raised if isinstance(key, tuple) and key not in now]:
            self._raised.discard(key)
        for key, alert in now.items():
            if key not in self._raised:
                self._raised.add(key)
                new.append(Raised(alert.kind, alert.text, readings.num_steps))
        return [alert for alert in new if alert is not None]

    def _limit(self, limit: Limit, readings: Readings) -> Raised | None:
        value = readings.quantities.get(limit.quantity)
        if value is None or not limit.is_passed(value):
            self._since.pop(limit, None)
            self._raised.discard(limit)
            return None
        first = max(0, readings.num_steps - readings.window_steps)
        steps = readings.num_steps - self._since.setdefault(limit, first)
        if steps < limit.steps or limit in self._raised:
            return None
        self._raised.add(limit)
        who = ""
        if readings.straggler is not None:
            who = f"; rank {readings.straggler.rank} costs most ({readings.straggler.cause})"
        text = f"{limit.quantity} is {value:.4g} over {steps} steps (alert: {limit.text}){who}"
        return Raised(limit.text, text, readings.num_steps, value)


def tell(
    alert: Raised, *, say: Callable[[str], None], command: str | None, webhook: str | None
) -> None:
    """Passes an alert on: to the log, a command and a webhook.

    Args:
        say: Prints a line.
        command: Run by the shell, with the line in ``DDLTRACE_ALERT``.
        webhook: Gets a POST request with `rule`, `text`, `step` and `value` as JSON.
    """
    say(f"alert: {alert.text}")
    if command is not None:
        try:
            subprocess.run(
                command,
                shell=True,  # the user's own command line
                env={**os.environ, "DDLTRACE_ALERT": alert.text},
                stdin=subprocess.DEVNULL,
                timeout=_ACTION_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            say(f"the alert's command failed: {error}")
    if webhook is not None:
        body = {"rule": alert.rule, "text": alert.text, "step": alert.step, "value": alert.value}
        request = urllib.request.Request(
            webhook, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_ACTION_TIMEOUT_S):
                pass
        except (OSError, ValueError) as error:
            say(f"the alert's webhook failed: {error}")
