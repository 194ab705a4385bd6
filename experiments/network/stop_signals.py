"""Turns the signals that request the end of a launcher into an exception."""

from __future__ import annotations

import signal
from typing import Any, Final, NoReturn

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal requests the end; clean-up runs first.

    Attributes:
        number: The number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_stop_signals() -> None:
    """Raises `Stopped` at the first of these signals; the clean-up is not interrupted by others."""
    for number in _STOP_SIGNALS:
        signal.signal(number, _stop)


def ignore_stop_signals() -> None:
    """Ignores further signals."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: Any) -> NoReturn:
    ignore_stop_signals()
    raise Stopped(number)
