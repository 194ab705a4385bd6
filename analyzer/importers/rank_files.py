"""Determines the rank of each file of a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MAX_RANK: Final = 10**9 - 1  # a segment's name has at most nine digits

_IN_NAME: Final = (
    re.compile(r"rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"worker[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"\.(\d{1,9})\.et(?:\.[a-z]+)*$", re.IGNORECASE),
    re.compile(r"[-_](\d{1,9})(?:\.[a-z]+)*$", re.IGNORECASE),
)


def rank_in_name(name: str) -> int | None:
    """The rank in a file's name; None if there is none."""
    for pattern in _IN_NAME:
        if match := pattern.search(name):
            return int(match.group(1))
    return None


def assign_ranks(stated: Sequence[int | None], names: Sequence[str], notes: list[str]) -> list[int]:
    """Assigns a rank to every file: the rank in its content, else in its name, else its position.

    Several files that state the same rank keep it: they may be parts of one recording.

    Args:
        stated: Per file the rank that its content states.
        names: The files' names.
        notes: Receives notes on guesses.
    """
    if all(rank is not None for rank in stated):
        return [rank for rank in stated if rank is not None]
    guesses = [
        rank_in_name(name) if rank is None else rank
        for rank, name in zip(stated, names, strict=True)
    ]
    known = [guess for guess in guesses if guess is not None]
    if len(known) == len(guesses) and len(set(known)) == len(known):
        notes.append("ranks are taken from the names of the files: the files do not state them")
        return known
    taken = {rank for rank in stated if rank is not None}
    free = (number for number in range(len(stated) + len(taken)) if number not in taken)
    if len(stated) > 1:
        notes.append(
            "some files state no rank, neither inside nor in their names: "
            "they are numbered in the order of their names"
        )
    return [next(free) if rank is None else rank for rank in stated]
