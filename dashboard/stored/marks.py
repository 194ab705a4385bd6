"""Marks that a user puts on the timeline, with notes: kept beside the trace.

They are kept in the file `FILE` of the trace directory or, where that cannot be written, in the
user's cache. A trace is data of strangers, and so are its marks: what is not a mark is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from ddltrace.dashboard.stored.cache import folder_of_user
from ddltrace.tracer.owner_access import make_private_folder
from ddltrace.tracer.storage.plain_files import open_plain
from ddltrace.tracer.trace.json_files import write_json_atomically

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

FILE: Final = ".ddltrace-marks"
MOST: Final = 200
"""Marks of a trace."""

LONGEST: Final = 300
"""Characters of a note."""

_MAX_BYTES: Final = 1 << 20
_LATEST_NS: Final = 1 << 53  # what a number in a browser can hold


class Mark(TypedDict):
    """A mark: its time in nanoseconds since the trace's first event, and its note."""

    t: int
    text: str


def load_marks(trace: Trace) -> list[Mark]:
    """Returns the marks of a trace by time; none if they cannot be read."""
    for path in reversed(_places(trace)):  # the user's own are newer, where there are any
        try:
            with open_plain(path) as file:
                found = json.loads(file.read(_MAX_BYTES))
            return valid_marks(found["marks"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return []


def save_marks(trace: Trace, marks: list[Mark]) -> None:
    """Keeps the marks of a trace in place of those before.

    Raises:
        OSError: No place can be written.
    """
    *beside, own = _places(trace)
    value = {"marks": valid_marks(marks)}
    for path in beside:
        try:
            write_json_atomically(path, value)
        except OSError:
            continue
        own.unlink(missing_ok=True)
        return
    make_private_folder(own.parent)
    write_json_atomically(own, value, private=True)


def valid_marks(found: Any) -> list[Mark]:
    """Those of some values that are marks, by time; of one time, the last."""
    by_time = {
        each["t"]: Mark(t=each["t"], text=each["text"][:LONGEST])
        for each in found
        if isinstance(each, dict)
        and type(each.get("t")) is int
        and 0 <= each["t"] < _LATEST_NS
        and isinstance(each.get("text"), str)
    }
    return [by_time[time] for time in sorted(by_time)][:MOST]


def _places(trace: Trace) -> list[Path]:
    """The files that may hold the marks of a trace, the preferred one first."""
    path, own = trace.path, folder_of_user(trace) / FILE
    return [path / FILE, own] if isinstance(path, Path) and path.is_dir() else [own]
