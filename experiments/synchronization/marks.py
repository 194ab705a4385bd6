"""The marks by which a trace carries clocks: markers whose names are ``sync WHAT KEY=VALUE ...``.

| mark | on | meaning |
|---|---|---|
| ``rule spec= workers= servers=`` | server, worker | the rule, at the start |
| ``apply worker= clock= update=`` | server | a push is part of an update |
| ``drop worker= clock=`` | server | a push came too late and is not applied |
| ``read worker= clock= held= bound= active=`` | server | from a read's request to its answer |
| ``leave worker= how=`` | server | a worker has ``finished`` or ``died`` |
| ``step worker= clock=`` | worker | a step, up to its push or average |
| ``mix worker= clock= peers=`` | peer | a mean with neighbours, from the end of its own step |
| ``average worker= clock= peer= peer_clock=`` | peer | a mean of two peers |
| ``group worker= clock=``, ``all worker= clock=`` | rank | a mean of a group, of all ranks |

Workers are identified by their global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "sync "
_NONE: Final = "-"


@dataclass(frozen=True)
class Mark:
    """One mark.

    Attributes:
        what: The kind of mark.
        worker: Global rank of the worker; -1 if the mark concerns no worker.
        clock: The worker's clock; -1 if it has none.
        numbers: Lists of integers by key.
        texts: Other values by key.
        start_ns: Start time, on the clock of its process.
        end_ns: End time.
    """

    what: str
    worker: int = -1
    clock: int = -1
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0

    def one(self, key: str) -> int | None:
        """The number of a key that has one; None if it has none."""
        values = self.numbers.get(key, ())
        return values[0] if values else None


def mark_name(what: str, **values: int | str | Sequence[int] | None) -> str:
    """The name of a mark.

    Args:
        what: The kind of mark.
        values: Its keys; a list of integers is joined by commas, None is a dash.
    """
    return PREFIX + " ".join([what, *(f"{key}={_text(value)}" for key, value in values.items())])


def read_mark(name: str, start_ns: int = 0, end_ns: int = 0) -> Mark | None:
    """The mark of a name; None if the name is not that of a mark.

    Args:
        name: The name of a marker.
        start_ns: Start time of the marker.
        end_ns: End time.
    """
    if not name.startswith(PREFIX):
        return None
    what, *pairs = name[len(PREFIX) :].split(" ")
    numbers: dict[str, tuple[int, ...]] = {}
    texts: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            return None
        try:
            listed = [] if value in ("", _NONE) else [int(part) for part in value.split(",")]
        except ValueError:
            texts[key] = value
        else:
            numbers[key] = tuple(listed)
    worker, clock = (numbers.pop(key, ()) or (-1,) for key in ("worker", "clock"))
    return Mark(what, worker[0], clock[0], numbers, texts, start_ns, end_ns)


def _text(value: int | str | Sequence[int] | None) -> str:
    if value is None:
        return _NONE
    if isinstance(value, int | str):
        return str(value)
    return ",".join(map(str, value)) or _NONE
