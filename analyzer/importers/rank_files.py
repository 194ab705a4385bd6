"""Determines the rank of each file of a job; ``docs/trace-format.md`` has the rule.

Only what a file states, or what names a rank, is evidence. Any other number in a name, such as a
time or a process id, is not a rank.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

from ddltrace.tracer.errors import TraceError

MAX_RANK: Final = 10**9 - 1  # a segment's name has at most nine digits
ASCEND_FOLDER: Final = "ASCEND_PROFILER_OUTPUT"
"""Where torch_npu puts the files of a rank, in a folder of the rank's own."""

# A rank in one dimension of several is not the rank in the job.
_DIMENSION: Final = r"(?<![a-z])(?:tp|dp|pp|ep|cp|sp|mp|etp|edp)"
_RANK: Final = re.compile(r"(?<![a-z])rank[-_. =]?(\d{1,9})(?!\d)", re.IGNORECASE)
_RANK_IN_DIMENSION: Final = re.compile(rf"{_DIMENSION}[-_. ]?rank", re.IGNORECASE)
_IN_NAME: Final = (
    _RANK,
    re.compile(r"worker[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE),
    re.compile(r"\.(\d{1,9})\.et(?:\.[a-z]+)*$", re.IGNORECASE),
)
# Of a job that is parallel in other dimensions, too, this alone is not a rank.
_TENSOR_PARALLEL: Final = re.compile(r"(?<![a-z])TP-(\d{1,9})(?!\d)", re.IGNORECASE)
_OTHER_PARALLEL: Final = re.compile(r"(?<![a-z])(?:DP|PP|EP|CP)[-_]?\d", re.IGNORECASE)
_AT_END: Final = re.compile(r"(\d{1,9})(?:\.[a-z]+)*$", re.IGNORECASE)
_NODE: Final = re.compile(r"(?<![a-z])(?:node|host|machine)[-_. ]?(\d{1,9})(?!\d)", re.IGNORECASE)
_WINDOW: Final = re.compile(r"(.+)\.\d{10,19}(?:\.pt)?\.trace\.json(?:\.gz)?$")
"""A file of ``torch.profiler.tensorboard_trace_handler``: the name of the worker and a time."""

_PROFILER_INFO: Final = re.compile(r"profiler_info_(\d{1,9})\.json$")

# What scripts that merge files write into the ids or the names of processes.
_BRACKETED: Final = re.compile(r"\[([^\]]*\d[^\]]*)\]")
_IN_PROCESS: Final = re.compile(
    rf"(?:(?<![a-z])(?:global[-_ ]?)?rank|{_DIMENSION})[-_. :=#]?\d+(?!\d)", re.IGNORECASE
)
_BEHIND: Final = re.compile(r"^-?[0-9A-Za-z]+_(\d{1,9})$")
_DEVICE: Final = re.compile(r"-?\d{1,9}")
_MAX_DEVICE: Final = 255
"""No host has a device of a larger number."""

Guesses = list[int | None]


def rank_in_name(name: str) -> int | None:
    """The rank in the name of a file or folder; None if there is none."""
    name = _RANK_IN_DIMENSION.sub(lambda match: match.group()[:2], name)
    patterns = _IN_NAME if _OTHER_PARALLEL.search(name) else (*_IN_NAME, _TENSOR_PARALLEL)
    for pattern in patterns:
        if match := pattern.search(name):
            return int(match.group(1))
    return None


def names_rank(path: PurePath) -> bool:
    """Whether the name of a file, or of a folder above it, names a rank.

    Args:
        path: A path below the folder that was given.
    """
    return any(rank_in_name(part) is not None for part in path.parts) or any(
        part.isdecimal() or part == ASCEND_FOLDER for part in path.parts[:-1]
    )


class _Evidence(NamedTuple):
    """Ranks by one kind of evidence, and how a note calls it."""

    ranks: Guesses
    what: str

    @property
    def is_complete(self) -> bool:
        return None not in self.ranks

    @property
    def is_distinct(self) -> bool:
        return self.is_complete and len(set(self.ranks)) == len(self.ranks)


def assign_ranks(
    stated: Sequence[int | None], paths: Sequence[Path], notes: list[str], *, several: bool = False
) -> list[int]:
    """Assigns a rank to every file; ``docs/trace-format.md`` has the rule.

    Args:
        stated: Per file the rank that its content states.
        paths: The files.
        notes: Receives a note on the evidence where it is not the content.
        several: Whether files may be of one rank, as parts of one recording.

    Raises:
        TraceError: Two files are of one rank, where that cannot be.
    """
    silent = [place for place, rank in enumerate(stated) if rank is None]
    ranks = dict(enumerate(stated))
    taken = {rank for rank in stated if rank is not None}
    if silent:
        found = _named([paths[place] for place in silent])
        ranks |= zip(silent, found.ranks, strict=True)
        taken |= {rank for rank in found.ranks if rank is not None}
        unnamed = [place for place in silent if ranks[place] is None]
        free = (number for number in range(len(stated) + len(taken)) if number not in taken)
        order: dict[Path, int] = {}
        for place in unnamed:
            worker = _worker(paths[place]) if several else paths[place]
            ranks[place] = (
                order[worker] if worker in order else order.setdefault(worker, next(free))
            )
        notes.append(_note(len(stated), len(silent), len(unnamed), found.what))
    assigned = [rank for rank in ranks.values() if rank is not None]
    of_rank: dict[int, list[int]] = defaultdict(list)
    for place, rank in enumerate(assigned):
        of_rank[rank].append(place)
    repeated = next((places for places in of_rank.values() if len(places) > 1), None)
    if repeated is not None and not several:
        one, other = (paths[place] for place in repeated[:2])
        raise TraceError(
            f"{one} and {other} are both of rank {assigned[repeated[0]]}: several files are of "
            "one rank, give those of one job"
        )
    if silent and any(len(of_rank[assigned[place]]) > 1 for place in silent):
        notes.append("files of one rank are taken as parts of its recording")
    return assigned


def _named(paths: Sequence[Path]) -> _Evidence:
    """The ranks that names give, by the first kind of evidence that tells all files apart."""
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    below = [path.absolute().relative_to(root) for path in paths]
    files = _Evidence([rank_in_name(path.name) for path in below], "names of the files")
    found = [
        _Evidence([_beside(path) for path in paths], "names of profiler_info_N.json"),
        _Evidence(_by_folder(below), "names of the folders"),
        _Evidence(_by_node(below, files.ranks), "names of the files, counted on from node to node"),
        files,
    ]
    if all(rank is None for each in found for rank in each.ranks) and len(paths) > 1:
        ends = _counted([_number(_AT_END, path.name) for path in below], below)
        found.append(_Evidence(ends, "numbers at the ends of the names of the files"))
    distinct = next((each for each in found if each.is_distinct), None)
    complete = next((each for each in found if each.is_complete), None)
    if distinct is not None or complete is not None:
        return distinct or complete or found[0]
    if _folders_of_numbers(below) and all(rank is None for each in found for rank in each.ranks):
        raise TraceError(
            f"the folders in {root} are called by numbers that do not count them from 0: name "
            "them rank0, rank1 and so on if these are ranks"
        )
    kinds = [each for each in found if any(rank is not None for rank in each.ranks)]
    first = [
        next((rank for rank in its if rank is not None), None)
        for its in zip(*(each.ranks for each in kinds), strict=True)
    ]
    return _Evidence(first or [None] * len(paths), " and the ".join(each.what for each in kinds))


def _by_folder(below: Sequence[PurePath]) -> Guesses:
    """The rank in the name of each file's nearest folder that has one."""
    found = []
    for path in below:
        named = (rank_in_name(folder.name) for folder in path.parents)
        found.append(next((rank for rank in named if rank is not None), None))
    if any(rank is not None for rank in found):
        return found
    numbers = _folders_of_numbers(below)
    counts = set(numbers) == set(range(len(set(numbers))))  # dates and steps are not ranks
    return [*numbers] if numbers and counts else [None] * len(below)


def _folders_of_numbers(below: Sequence[PurePath]) -> list[int]:
    """The numbers that are the names of the files' folders; none unless all are."""
    numbers = [[int(part) for part in path.parts[:-1] if part.isdecimal()] for path in below]
    return [each[0] for each in numbers] if all(numbers) else []


def _by_node(below: Sequence[PurePath], local_ranks: Guesses) -> Guesses:
    """Ranks where the names count the ranks of each node from 0; else none.

    Raises:
        TraceError: Some of a node's ranks have no file, so that it is unknown how many it had.
    """
    unknown: Guesses = [None] * len(below)
    nodes = [
        next((node for part in path.parts if (node := _number(_NODE, part)) is not None), None)
        for path in below
    ]
    of_node: dict[int, set[int]] = defaultdict(set)
    for node, local in zip(nodes, local_ranks, strict=True):
        if node is None or local is None:
            return unknown
        of_node[node].add(local)
    if len(set().union(*of_node.values())) == sum(map(len, of_node.values())):
        return unknown  # the names give ranks of the job
    if any(ranks != set(range(len(ranks))) for ranks in of_node.values()):
        raise TraceError(
            "the names of the files count the ranks of each node from 0, and some of them have no "
            "file: their ranks in the job are unknown, put them into the names"
        )
    first, ranks = 0, unknown
    for node in sorted(of_node):
        ranks = [
            first + local if its == node and local is not None else rank
            for its, local, rank in zip(nodes, local_ranks, ranks, strict=True)
        ]
        first += len(of_node[node])
    return ranks


def _counted(numbers: Guesses, below: Sequence[PurePath]) -> Guesses:
    """Numbers that count the files from 0 without a gap; else none."""
    counts = sorted(n for n in numbers if n is not None) == list(range(len(numbers)))
    is_dimension = any(_OTHER_PARALLEL.search(path.name) for path in below)
    return numbers if counts and not is_dimension else [None] * len(numbers)


def _beside(path: Path) -> int | None:
    """The rank that torch_npu writes into the name of a file in the folder of a rank."""
    folder = path.absolute().parent
    if folder.name == ASCEND_FOLDER:
        folder = folder.parent
    elif not path.name.startswith("trace_view"):
        return None
    found = {
        int(match.group(1))
        for each in folder.glob("profiler_info_*.json")
        if (match := _PROFILER_INFO.match(each.name))
    }
    return found.pop() if len(found) == 1 else None


def _worker(path: Path) -> Path:
    """What the windows of one worker have in common: the path without the time."""
    match = _WINDOW.match(path.name)
    return path if match is None else path.parent / match.group(1)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return None if match is None else int(match.group(1))


def _note(files: int, silent: int, unnamed: int, what: str) -> str:
    """Says where the ranks of the files that state none are from."""
    if files == 1:
        if unnamed:
            return "the file states no rank and its name has none: it is read as rank 0"
        one = what.replace("names", "name").replace("files", "file")
        return f"the rank is taken from the {one}: the file states none"
    subject = "ranks are" if silent == files else f"ranks of {silent} of {files} files are"
    if unnamed == silent:
        return (
            f"{subject} given in the order of the files' names: neither the files nor their names "
            "state them"
        )
    note = f"{subject} taken from the {what}: the files state none"
    if unnamed:
        verb = "file has none and takes" if unnamed == 1 else "files have none and take"
        note += f"; {unnamed} {verb} the free ranks in the order of the names"
    return note


def merged_ranks(
    hosts: Iterable[Any], devices: Iterable[Any], processes: Mapping[Any, Any]
) -> list[str]:
    """The ranks that a script has merged into one profile; empty if it is of one process.

    The profiler records one process: all host events of its file have the id of that process, and
    those of devices a small number. Scripts that merge files change the ids or name the processes,
    so that viewers show the ranks apart.

    Args:
        hosts: Ids of processes with events of the host.
        devices: Ids of processes with events of devices.
        processes: Id -> name of the processes in the file.
    """
    hosts, devices = set(hosts) - {None}, set(devices) - {None}
    labels = {rank_of_process(pid, processes.get(pid)) for pid in hosts | devices} - {None}
    if len(labels) > 1:
        return sorted(str(label) for label in labels)
    changed = not hosts and len(devices) > 1 and not all(map(_is_device, devices))
    if len(hosts) > 1 or changed:
        return sorted(f"process {pid}" for pid in hosts or devices)
    return []


def rank_of_process(pid: Any, name: Any = None) -> str | None:
    """What the name or the id of a process says of its rank; None for neither."""
    if isinstance(name, str) and (found := _IN_PROCESS.findall(name)):
        return "-".join(found)
    if not isinstance(pid, str):
        return None
    for pattern in (_BRACKETED, _RANK, _BEHIND):
        if match := pattern.search(pid):
            return match.group(1)
    found = _IN_PROCESS.findall(pid)
    return "-".join(found) or None


def _is_device(pid: Any) -> bool:
    return bool(_DEVICE.fullmatch(str(pid))) and int(pid) <= _MAX_DEVICE
