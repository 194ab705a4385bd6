"""Reads rates, times and sizes of memory that users write."""

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


LEAST_MEMORY: Final = 16_000_000
"""With less than 16 MB nothing can be read or queried."""

_MEMORY_UNITS: Final = {
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?i?B)", re.IGNORECASE)


def parse_memory_limit(text: str) -> int:
    """Reads a limit such as ``2GB`` or ``512MiB``; the result is in bytes.

    Raises:
        UsageError: The text is not a size, or less than 16 MB.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _MEMORY_UNITS[match[2].upper()]) if match else 0
    if size < LEAST_MEMORY:
        raise UsageError(f"{text!r:.40} is not a memory limit: write 16MB or more, such as 2GB")
    return size
