"""Numbers with what they count."""

from __future__ import annotations

from typing import Final

_MANY: Final = {"is": "are", "was": "were", "has": "have", "does": "do"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """A number and what it counts, with a verb if one is given: ``1 file is``, ``2 files are``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural} {agreeing(number, verb)}".rstrip()


def agreeing(number: int, verb: str) -> str:
    """The third person of a verb in the number of its subject."""
    return verb if number == 1 or not verb else _MANY.get(verb, verb[:-1])
