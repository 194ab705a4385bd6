"""Formats numbers and names for reports."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Final

NOT_KNOWN: Final = "\N{EN DASH}"
"""Text for a missing value."""

_TIME_UNITS: Final = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
_BYTE_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNT_UNITS: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_MAX_NAME: Final = 400
_AT_ONCE: Final = 1 << 16


def time_text(us: float | None) -> str:
    """A duration in microseconds with the unit that fits it, three digits."""
    if us is None:
        return NOT_KNOWN
    for scale, unit in _TIME_UNITS:
        if abs(us) >= scale:
            return f"{_digits(us / scale)} {unit}"
    return f"{us * 1e3:.0f} ns"


def change_text(us: float) -> str:
    """A difference of times in microseconds, as `time_text`, with its sign unless it is zero."""
    sign = "" if abs(us) < 5e-4 else "+" if us > 0 else "\N{MINUS SIGN}"
    return sign + time_text(abs(us))


def instant_text(us: float) -> str:
    """An instant in microseconds with the unit that fits it, to the microsecond.

    Instants that lie close together must differ as text; below a millisecond, to the nanosecond.
    """
    for (scale, unit), decimals in zip(_TIME_UNITS, (6, 3, 3), strict=True):
        if abs(us) >= scale:
            return f"{us / scale:,.{decimals}f} {unit}"
    return time_text(us)


def bytes_text(count: float | None) -> str:
    """A number of bytes with the decimal unit that fits it, three digits."""
    if count is None:
        return NOT_KNOWN
    for scale, unit in _BYTE_UNITS:
        if abs(count) >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """A number of things, three digits; from a million on with a prefix, such as ``2.31 M``."""
    for scale, prefix in _COUNT_UNITS:
        if count >= scale:
            return f"{_digits(count / scale)} {prefix}"
    return _digits(count)


def share_text(share: float | None) -> str:
    """A share of 0..1 in percent."""
    return NOT_KNOWN if share is None else f"{100 * share:.1f} %"


def bandwidth_text(gbps: float | None) -> str:
    """A bandwidth in gigabits per second with the unit that fits it."""
    if gbps is None:
        return NOT_KNOWN
    return f"{_digits(gbps)} Gbit/s" if gbps >= 1 else f"{_digits(gbps * 1e3)} Mbit/s"


def value_text(name: str, value: object) -> str:
    """A value of a record with the unit that the name of its attribute tells.

    Args:
        name: The attribute, such as ``busy_us``, ``max_gbps``, ``share`` or ``bytes``.
        value: Its value; None if it is not known.
    """
    if value is None or not isinstance(value, int | float) or name in _NUMBERED:
        return NOT_KNOWN if value is None else str(value)
    for ending, text in _TEXTS.items():
        if ending in name:
            return text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


_NUMBERED: Final = frozenset({"rank", "step", "stage", "replica"})
"""Attributes that are numbers of something, no amounts."""

_TEXTS: Final[dict[str, Callable[[float], str]]] = {
    "_us": time_text,
    "gbps": bandwidth_text,
    "share": share_text,
    "ratio": share_text,
    "bytes": bytes_text,
}


def printable(name: object) -> str:
    r"""A name from a trace with all control sequences escaped: ``\x1b`` is written out.

    Control characters, marks that change the direction of text, and other invisible characters are
    escaped as in Python literals; the length is bounded.
    """
    text = str(name)
    return escaped(text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…")


def escaped(text: str) -> str:
    """As `printable`, but whole: the length is not bounded."""
    if text.isprintable():
        return text
    if len(text) > _AT_ONCE:  # a list of its characters takes far more memory than the text
        parts = (text[first : first + _AT_ONCE] for first in range(0, len(text), _AT_ONCE))
        return "".join(map(escaped, parts))
    return "".join(
        character if _is_shown(character) else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def printable_words(text: str) -> str:
    """As `printable`, for a sentence or a command: each word is bounded, not the whole."""
    return " ".join(printable(word) for word in text.split(" "))


def _is_shown(character: str) -> bool:
    return character == " " or not unicodedata.category(character).startswith(("C", "Z"))


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
