"""Places the files of a job on one time axis, where some of them do not say when they began.

Times in a file are relative to ``baseTimeNanoseconds``, which newer versions of Kineto write behind
the events: a file that was cut off lacks it. Kineto rounds that base down to a quarter of a year
(7,889,238 s), so files of one job nearly always share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ddltrace.tracer.trace.run_info import RankInfo

_DATED_NS: Final = 1 << 58
"""1979: times of a file before it are not the time of day."""


class Placed(Protocol):
    """What this module needs of a file."""

    info: RankInfo
    stated_rank: int | None
    start_ns: int
    end_ns: int
    base_ns: int
    step_starts: dict[int, int]
    steps_from: str

    @property
    def name(self) -> str:
        """Its name, for notes."""

    def move(self, by_ns: int) -> None:
        """Adds to all its times."""


def place(files: Sequence[Placed], notes: list[str]) -> None:
    """Moves files whose base is unknown, or whose clock is hours off, to where the others are.

    A file without a base gets that of the others if its times then overlap theirs. One that
    cannot be placed so gets a clock of its own, which messages may align later; until then it
    begins where the others begin, or at a step that both have.

    Args:
        files: The files, in the order of their names.
        notes: Receives a note on each file that was moved.
    """
    dated = [file for file in files if file.start_ns >= _DATED_NS]
    undated = [file for file in files if file.start_ns < _DATED_NS]
    if dated and undated:
        for file in undated:
            base = next((one.base_ns for one in dated if _overlap(file, one, one.base_ns)), None)
            if base:
                file.move(base)
                notes.append(
                    f"{file.name}: baseTimeNanoseconds is lost: that of the other files is taken, "
                    "with which its times overlap theirs"
                )
            else:
                _give_own_clock([file], dated, notes)
    parts = _parts_in_time(files)
    main = max(parts, key=len)
    for part in parts:
        if part is not main and _is_same_time(part, main):
            _give_own_clock(part, main, notes)


def _overlap(file: Placed, other: Placed, by_ns: int) -> bool:
    return file.start_ns + by_ns < other.end_ns and other.start_ns < file.end_ns + by_ns


def _parts_in_time(files: Sequence[Placed]) -> list[list[Placed]]:
    """Files that overlap in time, one list for each stretch of time."""
    parts: list[list[Placed]] = []
    until = 0
    for file in sorted(files, key=lambda file: file.start_ns):
        if not parts or file.start_ns >= until:
            parts.append([])
        parts[-1].append(file)
        until = max(until, file.end_ns) if len(parts[-1]) > 1 else file.end_ns
    return parts


def _is_same_time(part: Sequence[Placed], main: Sequence[Placed]) -> bool:
    """Whether files are of the same steps as others, though their times are apart."""
    known = {file.stated_rank for file in main}
    if any(file.stated_rank is None or file.stated_rank in known for file in part):
        return False  # perhaps windows of one rank
    return _shared_step(part, main) is not None


def _shared_step(part: Sequence[Placed], main: Sequence[Placed]) -> int | None:
    """By how much a step of these files begins before the same step of the others, ns.

    Steps that are not marked are numbered from 0 in each file: their numbers say nothing.
    """
    if any(file.steps_from for file in (*part, *main)):
        return None
    starts = {number: start for file in main for number, start in file.step_starts.items()}
    return next(
        (
            starts[number] - start
            for file in part
            for number, start in file.step_starts.items()
            if number in starts
        ),
        None,
    )


def _give_own_clock(part: Sequence[Placed], main: Sequence[Placed], notes: list[str]) -> None:
    by = _shared_step(part, main)
    if by is None:
        by = min(file.start_ns for file in main) - min(file.start_ns for file in part)
    # Whole microseconds, so that rounding to microseconds stays what it is in the file.
    by -= by % 1000
    for file in part:
        file.move(by)
        file.info.clock_domain = f"clock of {part[0].name}"
        notes.append(
            f"{file.name} is not on the clock of the other files: unless messages align it, its "
            "place among them is unknown, and so is who waits for whom"
        )
