"""Determines the rank of each file of a folder.

The evidence, in this order: what the file states; a number after ``rank``, ``worker`` or ``TP`` in
its name (``rank-3.json``, ``worker3.1623143089861.pt.trace.json``, ``1760000000-TP-3.trace.json``),
or before ``.et``; if the files are in several folders, in the folder's name instead; numbers at the
ends of the names that count the files from 0 without a gap; the order of the names. Any other
number in a name, such as a time or a process id, is no rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MAX_RANK: Final = 10**9 - 1  # a segment's name has at most nine digits

_IN_NAME: Final = (
    re.compile(r"(?<![a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"worker[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"\.(\d{1,9})\.et(?:\.[a-z]+)*$", re.IGNORECASE),
)
# Of a job that is parallel in other dimensions, too, this alone is no rank.
_TENSOR_PARALLEL: Final = re.compile(r"(?<![a-z])TP-(\d{1,9})(?!\d)", re.IGNORECASE)
_OTHER_PARALLEL: Final = re.compile(r"(?<![a-z])(?:DP|PP|EP|CP)[-_]?\d", re.IGNORECASE)
_AT_END: Final = re.compile(r"(\d{1,9})(?:\.[a-z]+)*$", re.IGNORECASE)


def rank_in_name(name: str) -> int | None:
    """The rank in the name of a file or folder; None if there is none."""
    patterns = _IN_NAME if _OTHER_PARALLEL.search(name) else (*_IN_NAME, _TENSOR_PARALLEL)
    for pattern in patterns:
        if match := pattern.search(name):
            return int(match.group(1))
    return None


def assign_ranks(
    stated: Sequence[int | None], paths: Sequence[Path], notes: list[str], *, several: bool = False
) -> list[int]:
    """Assigns a rank to every file; the module's text has the rule.

    Several files that state the same rank keep it: they may be parts of one recording.

    Args:
        stated: Per file the rank that its content states.
        paths: The files.
        notes: Receives notes on the evidence where it is not the content.
        several: Whether names may give several files to one rank, as parts of one recording.
    """
    if all(rank is not None for rank in stated):
        return [rank for rank in stated if rank is not None]
    names = [path.name for path in paths]
    guesses = [
        rank_in_name(name) if rank is None else rank
        for rank, name in zip(stated, names, strict=True)
    ]
    if len({path.parent for path in paths}) > 1:  # in folders of ranks, see `formats.py`
        guesses = [
            rank_in_name(path.parent.name) if rank is None else rank
            for rank, path in zip(stated, paths, strict=True)
        ]
    if all(guess is None for guess in guesses):
        ends = [_AT_END.search(name) for name in names]
        numbers = [int(end.group(1)) for end in ends if end is not None]
        if len(names) > 1 and sorted(numbers) == list(range(len(names))):
            guesses = list(numbers)
    known = [guess for guess in guesses if guess is not None]
    distinct = len(set(known)) == len(known)
    if len(known) == len(guesses) and (distinct or several):
        notes.append("ranks are taken from the names of the files: the files do not state them")
        if not distinct:
            notes.append("files of one rank are taken as parts of its recording")
        return known
    taken = {rank for rank in stated if rank is not None}
    free = (number for number in range(len(stated) + len(taken)) if number not in taken)
    if len(stated) > 1:
        notes.append(
            "some files state no rank, neither inside nor in their names: "
            "they are numbered in the order of their names"
        )
    return [next(free) if rank is None else rank for rank in stated]
