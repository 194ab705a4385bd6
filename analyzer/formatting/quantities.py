"""Reads rates and times that users write."""

from __future__ import annotations

import re
from typing import Final

from ddltrace.tracer.errors import UsageError

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s|ps)?\Z", re.IGNORECASE)
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)\Z")
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str) -> int:
    """Reads a rate such as ``400mbit`` or ``2.5gbit``.

    Returns:
        Bits per second.

    Raises:
        UsageError: It is not a rate above zero.
    """
    match = _RATE.match(text.strip())
    bits = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if bits <= 0:
        raise UsageError(f"bandwidth {text!r:.40} is not a rate: write e.g. 400mbit or 10gbit")
    return bits


def parse_time(text: str, option: str) -> float:
    """Reads a time such as ``500us`` or ``2ms``.

    Args:
        text: The time.
        option: The option, for the message.

    Returns:
        Seconds.

    Raises:
        UsageError: It is not a time.
    """
    match = _TIME.match(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r:.40} is not a time: write for example 500us or 2ms")
    return float(match[1]) * _SECONDS[match[2]]
