"""Matches the steps of ranks that began to count them at different times.

A process that `ddltrace attach` has armed counts from then on. What its steps are called by the
other ranks follows from its process groups: PyTorch numbers the messages of each group, and every
rank of the group has launched the same ones when the same step ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_MOST_MARKS: Final = 64
_FEWEST_IN_COMMON: Final = 2
"""So many marks must agree: on backends that count sends and receives as well, ranks that send
different numbers of them can agree once by chance."""


class StepMarks:
    """The numbers of the newest messages at the end of each step so far, the last steps only."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, dict[str, int]]] = deque(maxlen=_MOST_MARKS)

    def note(self, step: int) -> None:
        """Notes the end of a step, or of a further optimizer's part in it.

        Args:
            step: What this rank calls it.
        """
        if self._marks and self._marks[-1][0] == step:
            self._marks.pop()
        self._marks.append((step, dict(_newest_messages())))

    def ended(self) -> list[tuple[int, dict[str, int]]]:
        """Each step, with the number of the newest message of each group; the last step may not
        have ended yet and is left out."""
        return list(self._marks)[:-1]


def _newest_messages() -> Iterator[tuple[str, int]]:
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    for group, name in list(c10d._world.pg_names.items()):
        with contextlib.suppress(Exception):  # of backends that do not number their messages
            # Groups that were split off another one at the same time share a name.
            first = dist.get_process_group_ranks(group)[0]
            yield f"{name} of {first}", group._get_sequence_number_for_group()


def match_steps(
    marks: Mapping[int, Sequence[tuple[int, Mapping[str, int]]]],
) -> dict[int, int]:
    """Finds what to add to each rank's steps so that all ranks call the same step the same.

    Args:
        marks: `StepMarks.ended`, by rank.

    Returns:
        The numbers to add, by rank; those without one cannot be matched with the first rank, not
        even by way of others.
    """
    places = {rank: _steps_at(of_rank) for rank, of_rank in marks.items()}
    first = min(places)
    shifts, to_try = {first: 0}, [first]
    while to_try:
        known = to_try.pop()
        for rank in places.keys() - shifts.keys():
            common = places[known].keys() & places[rank].keys()
            found = {places[known][place] - places[rank][place] for place in common}
            if len(common) >= _FEWEST_IN_COMMON and len(found) == 1:
                shifts[rank] = shifts[known] + found.pop()
                to_try.append(rank)
    least = min(shifts.values())
    return {rank: shift - least for rank, shift in shifts.items()}


def _steps_at(marks: Sequence[tuple[int, Mapping[str, int]]]) -> dict[tuple[str, int], int]:
    """The step that ended at a message; of messages at which only one did."""
    at = [((name, number), step) for step, numbers in marks for name, number in numbers.items()]
    ends = Counter(place for place, _ in at)
    return {place: step for place, step in at if ends[place] == 1}
