"""Reads Kineto traces, the JSON files that ``torch.profiler`` exports, one per rank."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.engine.engine import Engine, check_shared
from ddltrace.analyzer.events.copies import BANDWIDTHS_LABEL
from ddltrace.analyzer.formatting.text_table import shorten
from ddltrace.analyzer.importers.communication import count, members
from ddltrace.analyzer.importers.imported import (
    MAX_TIME_NS,
    OTHER,
    ImportedTrace,
    coded,
    coded_list,
    events_table,
    list_column,
)
from ddltrace.analyzer.importers.kineto import decode as rows_of
from ddltrace.analyzer.importers.kineto.decode import Decoded, decode_file
from ddltrace.analyzer.importers.kineto.decoded_events import Intervals, intervals_of
from ddltrace.analyzer.importers.kineto.decoded_messages import (
    ALL_RANKS,
    DEFAULT_GROUP,
    MEMBERS_UNKNOWN,
    Describer,
    Message,
)
from ddltrace.analyzer.importers.kineto.parallel_decode import read_side_by_side, text_bytes
from ddltrace.analyzer.importers.kineto.phases import (
    Spans,
    backward_calls,
    optimizer_steps,
    periodic_steps,
)
from ddltrace.analyzer.importers.memory_limit import ENVIRONMENT, limited_to
from ddltrace.analyzer.importers.names import Codes, clean
from ddltrace.analyzer.importers.rank_files import MAX_RANK, assign_ranks
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace import communication_kernels
from ddltrace.tracer.trace.arrow_arrays import integers
from ddltrace.tracer.trace.communication_kernels import (
    SUSPECTS_LABEL,
    also_known,
    is_message_kernel,
    is_suspect_kernel,
)
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS, PHASES
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "kineto"

_MARKS: Final = re.compile(
    rb'"(?:deviceProperties|distributedInfo|baseTimeNanoseconds|traceName)"\s*:'
    rb'|"cat"\s*:\s*"(?:cpu_op|kernel|cuda_runtime|cuda_driver|user_annotation|python_function'
    rb'|gpu_memcpy|gpu_memset|Operator|Runtime|Kernel)"'
)
_EXPORTED: Final = re.compile(rb'\{"displayTimeUnit":"ns","otherData":\{"source":"ddltrace"')
"""The start of a file of ``ddltrace export``, which resembles Kineto's but may hold many ranks."""

_STEP: Final = re.compile(r"ProfilerStep\s*#\s*(\d{1,9})$")
_LAUNCH: Final = re.compile(r"\w*LaunchKernel|(?:cuda|hip|cu|ur)\w*Launch\w*Kernel")
_ENGINE: Final = re.compile(r"autograd::engine::evaluate_function")
_PHASE_MARKS: Final = {
    "data": re.compile(r"enumerate\(DataLoader\)#"),
    "forward": re.compile(r"(?:DistributedDataParallel|FullyShardedDataParallel)\.forward$"),
    "optimizer": re.compile(r"Optimizer\.step#"),
}
_KINDS: Final = ("host", "kernel", "copy", "message", "step", "phase", "data", "marker")
_SOME_TEXT: Final = 32 << 20
"""Minimum size for helpers that only decode: starting one takes as long as decoding 20 MB."""
_MUCH_TEXT: Final = 128 << 20
"""Minimum size for helpers that also map events: their imports take as long as decoding 60 MB."""
MAX_STEPS_AT_ONCE: Final = 8
"""Limit of concurrent profiler steps, which keeps the cost of the analysis linear."""

_SAME_BANDWIDTH: Final = 1e-4
_DATED_NS: Final = 1 << 58
"""1979: times of a file before it are not the time of day."""

_MAX_LISTED: Final = 20
_SHOWN_SUSPECTS: Final = 3
_SUSPECT_NAME: Final = 60
_MAX_COUNTED: Final = 1 << 20


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is a Kineto trace."""
    return _MARKS.search(head) is not None and _EXPORTED.match(head) is None


_MAX_NAMED: Final = 4


@dataclass
class RankFile:
    """One file, read but not yet joined with those of the other ranks."""

    path: Path
    table: pa.Table
    info: RankInfo
    stated_rank: int | None
    devices: set[Any]
    start_ns: int
    end_ns: int
    base_ns: int
    step_starts: dict[int, int]
    kernel_classes: dict[str, int]
    copy_bandwidths: list[float] | None
    suspects: Counter[str] = field(default_factory=Counter)
    unknown_categories: Counter[str] = field(default_factory=Counter)
    steps_from: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return clean(self.path.name, 100)

    def move(self, by_ns: int) -> None:
        """Adds to all times of the file."""
        self.start_ns += by_ns
        self.end_ns += by_ns
        self.base_ns += by_ns
        self.step_starts = {number: at + by_ns for number, at in self.step_starts.items()}
        for name in ("start_ns", "end_ns", "enqueue_ns"):
            moved = pc.add(self.table[name], by_ns)
            place = self.table.schema.get_field_index(name)
            self.table = self.table.set_column(place, self.table.schema.field(name), moved)


def read(paths: Sequence[Path], engine: Engine | None = None) -> ImportedTrace:
    """Reads the Kineto files of a job.

    Args:
        paths: One file per rank, or several for consecutive windows of one rank.
        engine: Reads the files, one per task; by default this process and helpers of it do.

    Returns:
        The trace; times are Unix nanoseconds if the files contain the time of day.

    Raises:
        TraceError: None of the files holds an event.
    """
    files = _read_files(paths) if engine is None else _read_on(engine, paths)
    run = RunInfo(status="complete", level="op", source=NAME)
    whole = [file for file in files if file.table.num_rows]
    if not whole:
        raise TraceError(f"{paths[0]} holds no interval (an event of phase X) that can be read")
    for file in files:
        prefix = f"{file.path.name}: " if len(files) > 1 else ""
        run.notes.extend(prefix + note for note in file.notes)
        if not file.table.num_rows:
            run.notes.append(f"{prefix}holds no interval and is left out")
    _place(whole, run.notes)
    ranks = assign_ranks(
        [file.stated_rank for file in whole],
        [file.path for file in whole],
        run.notes,
        several=True,
    )
    tables: dict[str, pa.Table] = {}
    for rank in sorted(set(ranks)):
        mine = [file for file, its in zip(whole, ranks, strict=True) if its == rank]
        info, table = _join_windows(rank, mine, run.notes)
        run.ranks.append(info)
        tables[info.segment] = table
    _complete_run(run, whole)
    for info in run.ranks:
        tables[info.segment] = _with_own_groups(info, tables[info.segment])
    _note_unknown_members(run)
    single = {rank: file for rank, file in zip(ranks, whole, strict=True) if ranks.count(rank) == 1}
    bandwidths = {str(rank): file.copy_bandwidths for rank, file in single.items()}
    run.labels[BANDWIDTHS_LABEL] = {
        rank: values for rank, values in bandwidths.items() if values is not None
    }
    return number_messages(run, tables)


def _read_files(paths: Sequence[Path]) -> list[RankFile]:
    """Reads files in this process or with helpers, whichever is faster."""
    if text_bytes(paths) < _MUCH_TEXT:
        return read_side_by_side(paths, decode_file, map_file, _SOME_TEXT)
    return read_side_by_side(paths, read_file, lambda _, file: file, _MUCH_TEXT)


def _read_on(engine: Engine, paths: Sequence[Path]) -> list[RankFile]:
    """Reads files in tasks, with the limit of memory that is set in this process."""
    check_shared(engine, paths[0])
    task = partial(
        _read_elsewhere,
        size=os.environ.get(ENVIRONMENT),
        kernels=os.environ.get(communication_kernels.ENVIRONMENT),
    )
    absolute = [path.absolute() for path in paths]
    return list(engine.map(task, absolute, "reading files", one_at_a_time=True))


def _read_elsewhere(path: Path, size: str | None, kernels: str | None) -> RankFile:
    with limited_to(size), also_known(kernels):
        return read_file(path)


def read_file(path: Path) -> RankFile:
    """Reads one file; values that depend on all files are filled in later."""
    return map_file(path, decode_file(path))


def map_file(path: Path, decoded: Decoded) -> RankFile:
    """Converts a decoded file to events.

    Raises:
        TraceError: Several ranks were merged into it.
    """
    if decoded.merged:
        shown = ", ".join(clean(name, 60) for name in decoded.merged[:_MAX_NAMED])
        raise TraceError(
            f"several ranks are merged into one file, {path.name} ({shown}): "
            "give the ranks' own files"
        )
    intervals = intervals_of(decoded)
    meta = decoded.meta
    distributed = meta.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    base = count(meta.get("baseTimeNanoseconds")) or 0
    # Whole microseconds, so that rounding to microseconds stays what it is in the file.
    base -= base % 1000
    if len(intervals) and base + int(intervals.end.max()) >= MAX_TIME_NS:
        base = 0
    world_size = count(distributed.get("world_size"), MAX_RANK) or 0
    mapper = _Mapper(intervals, distributed, base)
    table = mapper.table()
    suspects = mapper.suspects()
    info = RankInfo(
        rank=0,
        segment="",
        world_size=world_size,
        pid=intervals.pid,
        host=_text(meta.get("host_name")),
        status="complete",
        level="op",
        backend=_text(distributed.get("backend")) or None,
        device="cuda" if mapper.on_device else "cpu",
        groups=list(mapper.groups.values()),
        events=table.num_rows,
    )
    file = RankFile(
        path=path,
        table=table,
        info=info,
        stated_rank=count(distributed.get("rank"), MAX_RANK),
        devices=set(intervals.devices),
        start_ns=base + int(intervals.start.min()) if len(intervals) else 0,
        end_ns=base + int(intervals.end.max()) if len(intervals) else 0,
        base_ns=base,
        step_starts=mapper.step_starts,
        kernel_classes=mapper.kernel_classes(suspects.total()),
        copy_bandwidths=mapper.copy_bandwidths(),
        suspects=suspects,
        unknown_categories=mapper.unknown_categories(),
        steps_from=mapper.steps_from,
    )
    if mapper.overlapping_steps:
        file.notes.append(
            f"{counted(mapper.overlapping_steps, 'profiler step', 'is')} read as annotations: "
            f"more than {MAX_STEPS_AT_ONCE} of them run at once, which steps of a training do not"
        )
    if mapper.messages_beside:
        file.notes.append(
            f"{counted(mapper.messages_beside, 'message')} on the host (Gloo, MPI or UCC) ran "
            "beside those of the device: among the collectives, but not in the communication of "
            "the rank"
        )
    lost, launches = mapper.lost_kernels()
    if lost and not decoded.losses:
        file.notes.append(
            f"the kernels of {lost} of {launches} launches are missing: the profiler lost them, "
            "and compute and communication are more than is shown"
        )
    file.notes.extend(decoded.losses)
    if intervals.left_out:
        file.notes.append(
            f"{counted(intervals.left_out, 'interval')} without a usable time "
            f"{agreeing(intervals.left_out, 'is')} left out"
        )
    if base == 0 and intervals.fractional and file.start_ns > 1 << 60:
        file.notes.append("absolute times with fractions: they are exact to 0.25 microseconds only")
    return file


def _place(files: Sequence[RankFile], notes: list[str]) -> None:
    """Moves files whose base is unknown, or whose clock is hours off, to where the others are.

    Times in a file are relative to ``baseTimeNanoseconds``, which newer versions of Kineto write
    behind the events: a file that was cut off lacks it. Kineto rounds that base down to a quarter
    of a year (7,889,238 s), so files of one job nearly always share it.

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


def _overlap(file: RankFile, other: RankFile, by_ns: int) -> bool:
    return file.start_ns + by_ns < other.end_ns and other.start_ns < file.end_ns + by_ns


def _parts_in_time(files: Sequence[RankFile]) -> list[list[RankFile]]:
    """Files that overlap in time, one list for each stretch of time."""
    parts: list[list[RankFile]] = []
    until = 0
    for file in sorted(files, key=lambda file: file.start_ns):
        if not parts or file.start_ns >= until:
            parts.append([])
        parts[-1].append(file)
        until = max(until, file.end_ns) if len(parts[-1]) > 1 else file.end_ns
    return parts


def _is_same_time(part: Sequence[RankFile], main: Sequence[RankFile]) -> bool:
    """Whether files are of the same steps as others, though their times are apart."""
    known = {file.stated_rank for file in main}
    if any(file.stated_rank is None or file.stated_rank in known for file in part):
        return False  # perhaps windows of one rank
    return _shared_step(part, main) is not None


def _shared_step(part: Sequence[RankFile], main: Sequence[RankFile]) -> int | None:
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


def _give_own_clock(part: Sequence[RankFile], main: Sequence[RankFile], notes: list[str]) -> None:
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


def _join_windows(rank: int, files: list[RankFile], notes: list[str]) -> tuple[RankInfo, pa.Table]:
    """Joins the files of one rank: consecutive windows of one recording."""
    files = sorted(files, key=lambda file: file.start_ns)
    kept = [files[0]]
    for file in files[1:]:
        if file.start_ns < kept[-1].end_ns:
            notes.append(
                f"{file.path.name} is left out: like {kept[-1].path.name} it is of rank {rank}, "
                "at the same time"
            )
        else:
            kept.append(file)
    info = kept[0].info
    info.rank = rank
    info.segment = segment_name(rank=rank, attempt=0, pid=info.pid or 0)
    info.world_size = max(file.info.world_size for file in kept)
    table = kept[0].table
    if len(kept) > 1:
        notes.append(f"rank {rank}: {len(kept)} files are read as windows of one recording")
        table = pa.concat_tables(_numbered_on(kept)).unify_dictionaries()
        table = table.combine_chunks()
        groups = {group.name: group for file in reversed(kept) for group in file.info.groups}
        info.groups = list(groups.values())
        info.events = table.num_rows
    if not info.clock_domain and (kept[0].base_ns or kept[0].start_ns > _DATED_NS):
        info.clock = {"monotonic_ns": kept[0].start_ns, "unix_ns": kept[0].start_ns, "samples": []}
    return info, table


def _numbered_on(files: list[RankFile]) -> list[pa.Table]:
    """The windows' tables; derived steps, which each window numbers from 0, go on."""
    tables, first = [], 0
    for file in files:
        table = file.table
        if file.steps_from:
            place = EVENTS.get_field_index("step")
            step = pc.cast(pc.add(table["step"], first), pa.int32())
            table = table.set_column(place, EVENTS.field("step"), step)
            first += len(file.step_starts)
        tables.append(table)
    return tables


def _complete_run(run: RunInfo, files: list[RankFile]) -> None:
    """Fills in the values that depend on all ranks."""
    world_size = max(*(info.world_size for info in run.ranks), run.ranks[-1].rank + 1)
    one_host = _on_one_host(files, world_size)
    for info in run.ranks:
        info.world_size = world_size
        shared = info.host or ("one host" if one_host else f"host of rank {info.rank}")
        info.clock_domain = info.clock_domain or shared
        _complete_groups(info, world_size)
    run.host = run.ranks[0].host
    missing = world_size - len(run.ranks)
    if missing:
        run.notes.append(f"{missing} of {world_size} ranks {agreeing(missing, 'has')} no file")
    if not one_host and not all(info.host for info in run.ranks) and len(run.ranks) > 1:
        run.notes.append(
            "the files do not show whether the ranks share a clock: "
            "times of different ranks may not be comparable"
        )
    for origin in dict.fromkeys(file.steps_from for file in files if file.steps_from):
        run.notes.append(
            f"steps are derived from {origin} and numbered from 0: no step is marked "
            "(ProfilerStep); call step() of torch.profiler after each one to mark them"
        )
    if not any(file.step_starts for file in files):
        run.notes.append(
            "no training steps: call step() of torch.profiler after each one to see them"
        )
    classes: Counter[str] = Counter()
    suspects: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for file in files:
        classes.update(file.kernel_classes)
        suspects.update(file.suspects)
        categories.update(file.unknown_categories)
    run.labels["kernel_classes"] = dict(classes)
    if suspects:
        run.labels[SUSPECTS_LABEL] = dict(suspects.most_common(_MAX_LISTED))
        shown = ", ".join(
            f"{shorten(name, _SUSPECT_NAME, 'start')} ({counted(times, 'time')})"
            for name, times in suspects.most_common(_SHOWN_SUSPECTS)
        )
        more = len(suspects) - _SHOWN_SUSPECTS
        run.notes.append(
            f"{counted(len(suspects), 'kernel', 'is')} named like communication but of no known "
            f"library ({counted(suspects.total(), 'run')}) and "
            f"{agreeing(len(suspects), 'counts')} as computation: {shown}"
            f"{f' and {more} more' if more > 0 else ''}; if they communicate, add "
            "--communication-kernels REGEX"
        )
    if categories:
        run.labels["unknown_categories"] = dict(categories.most_common(_MAX_LISTED))
        run.notes.append(
            f"{counted(categories.total(), 'event')} of {counted(len(categories), 'category')} "
            f"unknown to this reader {agreeing(categories.total(), 'is')} kept as host work"
        )
    if any("missing" in note or "left out" in note for note in run.notes) or missing:
        run.status = "partial"


def _on_one_host(files: list[RankFile], world_size: int) -> bool:
    """Whether all ranks ran on one machine, by the devices: each rank used one of its own."""
    if len(files) == 1:
        return True
    used = [device for file in files for device in file.devices]
    return bool(used) and len(set(used)) == len(used) and len(used) >= len(files) >= world_size


def _complete_groups(info: RankInfo, world_size: int) -> None:
    """Fills in the members of groups that must contain all ranks."""
    info.groups = [
        GroupInfo(group.name, group.description, group.backend, tuple(range(world_size)))
        if not group.ranks and group.description == ALL_RANKS
        else group
        for group in info.groups
    ]


def _with_own_groups(info: RankInfo, table: pa.Table) -> pa.Table:
    """Names groups of which a rank states only the size: all ranks, or one group of this rank's.

    Two ranks that communicate in groups of one size need not be in the same group.
    """
    everyone = tuple(range(info.world_size))
    own: dict[str, GroupInfo] = {}
    for group in info.groups:
        if group.ranks or group.description != MEMBERS_UNKNOWN:
            continue
        if group.size == info.world_size:
            own[group.name] = replace(
                group, name=DEFAULT_GROUP, description=ALL_RANKS, ranks=everyone
            )
        else:
            own[group.name] = replace(group, name=f"{group.name} (rank {info.rank})")
    if not own:
        return table
    groups = {group.name: group for group in (own.get(g.name, g) for g in info.groups)}
    info.groups = list(groups.values())
    groups_of = table["group"].combine_chunks()
    names = [own[name].name if name in own else name for name in groups_of.dictionary.to_pylist()]
    codes = groups_of.indices.fill_null(0).to_numpy()
    column = coded("group", codes, names, groups_of.is_null().to_numpy(zero_copy_only=False))
    return table.set_column(EVENTS.get_field_index("group"), EVENTS.field("group"), column)


def _note_unknown_members(run: RunInfo) -> None:
    sizes = {g.size for info in run.ranks for g in info.groups if g.description == MEMBERS_UNKNOWN}
    for size in sorted(size for size in sizes if size is not None):
        run.notes.append(
            f"groups of {size} have neither a name nor members in the files: how long their ranks "
            "wait for each other is not known"
        )


class _Mapper:
    """Turns one file's intervals into events."""

    def __init__(self, intervals: Intervals, distributed: dict[str, Any], base_ns: int) -> None:
        self._in = intervals
        self._base = base_ns
        self._backend = _text(distributed.get("backend"))
        self._rank = count(distributed.get("rank"))
        self.groups = _configured_groups(distributed, self._backend)
        self._kernel = intervals.of_category(rows_of.KERNEL)
        self._message_kernel = intervals.named(is_message_kernel, self._kernel)
        self._copy = intervals.of_category(rows_of.COPY)
        self._sync = intervals.of_category(rows_of.SYNC)
        self._device_mark = intervals.of_category(rows_of.DEVICE_MARK)
        self._device = self._kernel | self._copy
        self._host = ~(self._device | self._sync | self._device_mark)
        self._launch = self._find_launches()

        self.on_device = bool(self._device.any())
        self.overlapping_steps = 0
        self.step_starts: dict[int, int] = {}
        self.steps_from = ""
        self.messages_beside = 0

    def table(self) -> pa.Table:
        """Builds the table; collects the groups, the steps' starts, and what is unusual."""
        intervals = self._in
        kind = np.zeros(len(intervals), dtype=np.int32)
        kind[self._kernel] = _KINDS.index("kernel")
        kind[self._copy] = _KINDS.index("copy")
        mark = intervals.of_category(rows_of.MARK) & self._host
        kind[mark | self._device_mark] = _KINDS.index("marker")
        steps, step_rows = self._steps()
        kind[step_rows] = _KINDS.index("step")
        derived = Spans.of(*(np.empty(0, np.int64) for _ in range(4)))
        if not len(step_rows) and not self.overlapping_steps and len(intervals):
            steps = derived = self._derived_steps()
        phases = self._phases(kind)
        rows, messages = self._messages()
        kind[rows] = _KINDS.index("message")
        backward = self._backward(kind)
        phases = _merged(phases, backward)
        cause = self._launch.copy()
        cause[rows] = [-1 if m.caused_by is None else m.caused_by for m in messages]
        # Device work and messages belong to the step and the phase of the call behind them.
        call = np.where(cause >= 0, cause, np.arange(len(intervals)))
        step = steps.at(intervals.start[call])
        on_thread = np.where(self._host[call], intervals.thread[call], -1)
        phase = phases.at_in_thread(intervals.start[call], on_thread)
        table = self._table(
            kind=kind, step=step, phase=phase, cause=cause, rows=rows, messages=messages
        )
        table = self._append(table, backward, "phase", steps.at(backward.start))
        starts = (steps.start + self._base).tolist()
        self.step_starts = dict(zip(steps.label.tolist(), starts, strict=True))
        return self._append(table, derived, "step", derived.label)

    def _find_launches(self) -> npt.NDArray[np.int64]:
        """For device work the row of the runtime call with the same correlation, else -1."""
        intervals = self._in
        launch = np.full(len(intervals), -1, dtype=np.int64)
        calls = np.flatnonzero(self._host & (intervals.correlation >= 0))
        works = np.flatnonzero(~self._host & (intervals.correlation >= 0))
        if len(calls) and len(works):
            calls = calls[np.argsort(intervals.correlation[calls], kind="stable")]
            keys = intervals.correlation[calls]
            place = np.searchsorted(keys, intervals.correlation[works])
            place = np.minimum(place, len(keys) - 1)
            found = keys[place] == intervals.correlation[works]
            launch[works[found]] = calls[place[found]]
        return launch

    def lost_kernels(self) -> tuple[int, int]:
        """Launches whose kernels are not in the file though later ones are; all launches.

        Kernels of the last launches may have run after the recording.
        """
        intervals = self._in
        launches = intervals.named(_LAUNCH.match, self._host) & (intervals.correlation >= 0)
        rows = np.flatnonzero(launches)
        found = np.isin(rows, self._launch[self._launch >= 0])
        last = intervals.start[rows[found]].max() if found.any() else np.inf
        return int((~found & (intervals.start[rows] < last)).sum()), len(rows)

    def copy_bandwidths(self) -> list[float] | None:
        """What the file states for each copy, GB/s; None if bytes and duration give the same."""
        intervals = self._in
        rows = np.flatnonzero(self._copy)
        stated = np.array([intervals.bandwidths.get(row, 0.0) for row in rows.tolist()])
        size = np.array([intervals.sizes.get(row, 0) for row in rows.tolist()])
        duration = np.maximum(intervals.end[rows] - intervals.start[rows], 1)
        same = np.allclose(stated, size / duration, rtol=_SAME_BANDWIDTH, atol=0)
        return None if same else stated.tolist()

    def _steps(self) -> tuple[Spans, npt.NDArray[np.int64]]:
        """The marked steps and their rows."""
        intervals = self._in
        numbers = [
            int(match.group(1)) if (match := _STEP.match(name)) else -1 for name in intervals.names
        ]
        number = np.array(numbers)[intervals.name] if len(intervals) else np.empty(0, np.int64)
        rows = np.flatnonzero((number >= 0) & self._host)
        if _most_at_once(intervals.start[rows], intervals.end[rows]) > MAX_STEPS_AT_ONCE:
            self.overlapping_steps = len(rows)
            rows = rows[:0]
        spans = Spans.of(
            intervals.start[rows], intervals.end[rows], number[rows], intervals.thread[rows]
        )
        return spans, rows

    def _derived_steps(self) -> Spans:
        """Steps of a file that marks none."""
        intervals = self._in
        thread = self._main_thread()
        calls = np.flatnonzero(intervals.named(_PHASE_MARKS["optimizer"].match, self._host))
        if len(calls):
            calls = calls[np.argsort(intervals.start[calls], kind="stable")]
            marks = intervals.named(_ENGINE.match, self._host)
            marks |= intervals.named(_PHASE_MARKS["forward"].match, self._host)
            self.steps_from = "calls of an optimizer"
            thread = int(intervals.thread[calls[-1]])
            start, end = optimizer_steps(
                intervals.start[calls],
                intervals.end[calls],
                intervals.name[calls],
                np.sort(intervals.start[marks]),
                int(intervals.start.min()),
            )
        else:
            kernels = np.flatnonzero(self._kernel & ~self._message_kernel)
            kernels = kernels[np.argsort(intervals.start[kernels], kind="stable")]
            launch = self._launch[kernels]
            launched = bool(len(launch)) and bool((launch >= 0).all())
            time = intervals.start[launch if launched else kernels]
            start, end = periodic_steps(intervals.name[kernels], time)
            if len(start):
                self.steps_from = "the repetition of kernels"
        threads = np.full(len(start), -1 if thread is None else thread)
        return Spans.of(start, end, np.arange(len(start)), threads)

    def _phases(self, kind: npt.NDArray[np.int32]) -> Spans:
        """Marks data, forward and optimizer; sets their rows' kinds."""
        intervals = self._in
        rows, labels = [], []
        for name, pattern in _PHASE_MARKS.items():
            found = np.flatnonzero(intervals.named(pattern.match, self._host))
            kind[found] = _KINDS.index("data" if name == "data" else "phase")
            rows.append(found)
            labels.append(np.full(len(found), PHASES.index(name)))
        every = np.concatenate(rows)
        return Spans.of(
            intervals.start[every],
            intervals.end[every],
            np.concatenate(labels),
            intervals.thread[every],
        )

    def _backward(self, kind: npt.NDArray[np.int32]) -> Spans:
        intervals = self._in
        rows = np.flatnonzero(intervals.named(_ENGINE.match, self._host))
        label = np.full(len(rows), PHASES.index("backward"))
        engine = Spans.of(intervals.start[rows], intervals.end[rows], label, intervals.thread[rows])
        begins = np.isin(kind, [_KINDS.index(name) for name in ("step", "phase", "data")])
        return backward_calls(engine, np.sort(intervals.start[begins]))

    def _messages(self) -> tuple[list[int], list[Message]]:
        intervals = self._in
        describer = Describer(intervals, self.groups, self._backend, self._rank)
        if not self.on_device:
            return describer.spans()
        found = np.flatnonzero(self._message_kernel)
        rows = found.tolist()
        messages = describer.kernels(rows, self._launch[found].tolist())
        on_host, their_messages = describer.host_spans()
        self.messages_beside = len(on_host) if rows else 0
        return rows + on_host, messages + their_messages

    def _table(
        self,
        *,
        kind: npt.NDArray[np.int32],
        step: npt.NDArray[np.int64],
        phase: npt.NDArray[np.int64],
        cause: npt.NDArray[np.int64],
        rows: list[int],
        messages: list[Message],
    ) -> pa.Table:
        intervals = self._in
        count_of_rows = len(intervals)
        columns = {
            "start_ns": integers(intervals.start + self._base),
            "end_ns": integers(intervals.end + self._base),
            "kind": coded("kind", kind, _KINDS),
            "name": coded("name", intervals.name, intervals.names),
            "lane": self._lanes(rows, messages),
            "step": integers(step, step < 0, pa.int32()),
            "phase": coded("phase", np.maximum(phase, 0), PHASES, phase < 0),
            "enqueue_ns": integers(intervals.start[cause] + self._base, cause < 0),
            "status": coded(
                "status",
                np.zeros(count_of_rows, dtype=np.int32),
                ["ok"],
                kind != _KINDS.index("message"),
            ),
        }
        if intervals.shapes:
            shape = intervals.shape
            columns["shapes"] = coded("shapes", np.maximum(shape, 0), intervals.shapes, shape < 0)
        sizes = _scattered(count_of_rows, list(intervals.sizes), list(intervals.sizes.values()))
        for name in ("bytes", "out_bytes", "seq", "peer", "tag"):
            values = [getattr(message, name) for message in messages]
            column = _scattered(count_of_rows, rows, values)
            if name == "bytes":
                column = np.where(column >= 0, column, np.where(self._copy, sizes, -1))
            if (column >= 0).any():
                wanted = pa.int32() if name in ("peer", "tag") else pa.int64()
                columns[name] = integers(column, column < 0, wanted)
        if any(message.split_bytes for message in messages):
            splits: list[list[int] | None] = [None] * count_of_rows
            for row, message in zip(rows, messages, strict=True):
                splits[row] = message.split_bytes
            columns["split_bytes"] = list_column("split_bytes", splits)
        for name in ("op", "group", "dtype"):
            columns[name] = _scattered_names(
                name, count_of_rows, rows, [getattr(message, name) for message in messages]
            )
        return events_table(count_of_rows, columns)

    def _lanes(self, rows: list[int], messages: list[Message]) -> pa.DictionaryArray:
        """Names every thread and stream; messages of the host are in a lane per group."""
        intervals = self._in
        threads = len(intervals.threads)
        multiple_devices = len(intervals.devices) > 1
        families = np.zeros(len(intervals), dtype=np.int64)
        families[self._device] = 1
        families[self._sync] = 2
        families[self._device_mark] = 3
        device = np.where(multiple_devices, intervals.device, -1) + 1
        key = (families * (len(intervals.devices) + 1) + device) * threads + intervals.thread
        used, codes = _distinct(key)
        main = self._main_thread()
        names = []
        for number in used.tolist():
            rest, thread = divmod(number, threads)
            family, on = divmod(rest, len(intervals.devices) + 1)
            track = intervals.threads[thread]
            where = f"@{intervals.devices[on - 1]}" if multiple_devices and on else ""
            names.append(
                (
                    "main" if thread == main else f"thread-{track}",
                    f"stream-{track}{where}",
                    f"sync/stream-{track}{where}",
                    f"annotation/stream-{track}{where}",
                )[family]
            )
        if not self.on_device:
            groups = Codes()
            codes[rows] = [len(names) + groups[message.group] for message in messages]
            names.extend(f"comm/{group}" for group in groups)
        return coded("lane", codes, names)

    def _main_thread(self) -> int | None:
        """Code of the thread that runs the training loop."""
        intervals = self._in
        _, rows = self._steps()
        if len(rows):
            return int(intervals.thread[rows[0]])
        return (
            intervals.threads.index(intervals.pid) if intervals.pid in intervals.threads else None
        )

    def _append(
        self, table: pa.Table, spans: Spans, kind: str, step: npt.NDArray[np.int64]
    ) -> pa.Table:
        """Appends events that the file does not contain as such: backward passes, or steps."""
        if not len(spans):
            return table
        size = len(spans)
        zeros = np.zeros(size, dtype=np.int32)
        main = self._main_thread()
        lanes = [
            "main" if thread in (main, -1) else f"thread-{self._in.threads[thread]}"
            for thread in spans.thread.tolist()
        ]
        # The lanes of a file with too many of them share an entry, see `coded`.
        known = set(table["lane"].chunk(0).dictionary.to_pylist())
        if OTHER in known:
            lanes = [lane if lane in known else OTHER for lane in lanes]
        columns = {
            "start_ns": integers(spans.start + self._base),
            "end_ns": integers(spans.end + self._base),
            "kind": coded("kind", zeros, [kind]),
            "name": coded("name", zeros, ["backward" if kind == "phase" else "step"]),
            "lane": coded_list("lane", lanes),
            "step": integers(step, step < 0, pa.int32()),
        }
        if kind == "phase":
            columns["phase"] = coded("phase", zeros, ["backward"])
        added = events_table(size, columns)
        # In two chunks: one would copy every column, the many empty ones included.
        return pa.concat_tables([table, added]).unify_dictionaries()

    def suspects(self) -> Counter[str]:
        """How often kernels ran that are named like communication but of no known library."""
        intervals = self._in
        unknown = intervals.named(is_suspect_kernel, self._kernel)
        times = np.bincount(intervals.name[unknown], minlength=len(intervals.names))
        found: Counter[str] = Counter()
        for code in np.flatnonzero(times):
            found[clean(intervals.names[code], 200)] += int(times[code])
        return found

    def kernel_classes(self, unknown: int) -> dict[str, int]:
        """How many kernels and copies are of each class; `unknown` of them are suspects."""
        communication = int(self._message_kernel.sum())
        return {
            "computation": int(self._kernel.sum()) - communication - unknown,
            "communication": communication,
            "memory": int(self._copy.sum()),
            "unknown": unknown,
        }

    def unknown_categories(self) -> Counter[str]:
        """How many intervals are of each category that this reader does not know."""
        known = (
            *(rows_of.KERNEL | rows_of.COPY | rows_of.SYNC | rows_of.DEVICE_MARK),
            *(rows_of.MARK | rows_of.OPERATOR | rows_of.RUNTIME),
        )
        intervals = self._in
        times = np.bincount(intervals.category, minlength=len(intervals.categories))
        return Counter(
            {
                clean(name, 60): int(number)
                for name, number in zip(intervals.categories, times, strict=False)
                if name not in known and number
            }
        )


def _most_at_once(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> int:
    """The maximum number of concurrent intervals."""
    if not len(start):
        return 0
    begun = np.arange(1, len(start) + 1)
    ended = np.searchsorted(np.sort(end), np.sort(start), side="right")
    return int((begun - ended).max())


def _distinct(keys: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Distinct values and the index of each; without sorting where the range is small."""
    if not len(keys) or keys.max() > _MAX_COUNTED:
        return np.unique(keys, return_inverse=True)
    used = np.flatnonzero(np.bincount(keys))
    index = np.zeros(int(used[-1]) + 1, dtype=np.int64)
    index[used] = np.arange(len(used))
    return used, index[keys]


def _configured_groups(distributed: dict[str, Any], backend: str) -> dict[str, GroupInfo]:
    """The process groups that the file's head lists."""
    groups: dict[str, GroupInfo] = {}
    entries = distributed.get("pg_config")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("pg_name"), str):
            continue
        name = clean(entry["pg_name"], 200)
        ranks = members(entry.get("ranks"))
        groups[name] = GroupInfo(
            name=name,
            description=_text(entry.get("pg_desc")),
            backend=_text(entry.get("backend_config")) or backend,
            ranks=ranks,
            size=None if ranks else count(entry.get("pg_size")),
        )
        if len(groups) >= 1 << 14:
            break
    return groups


def _merged(left: Spans, right: Spans) -> Spans:
    return Spans.of(
        np.concatenate([left.start, right.start]),
        np.concatenate([left.end, right.end]),
        np.concatenate([left.label, np.full(len(right), PHASES.index("backward"))]),
        np.concatenate([left.thread, right.thread]),
    )


def _scattered(size: int, rows: list[int], values: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """A column with values at some rows and -1 elsewhere."""
    column = np.full(size, -1, dtype=np.int64)
    column[rows] = [-1 if value is None else value for value in values]
    return column


def _scattered_names(
    name: str, size: int, rows: list[int], values: Sequence[str | None]
) -> pa.DictionaryArray:
    codes = Codes()
    column = np.full(size, -1, dtype=np.int64)
    column[rows] = [-1 if value is None else codes[value] for value in values]
    return coded(name, np.maximum(column, 0), list(codes) or [""], column < 0)


def _text(value: Any) -> str:
    return clean(value, 200) if isinstance(value, str) else ""
