"""Notes on incomplete traces: missing ranks, lost events, killed processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ddltrace.tracer.exit_status import status_text
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.run_info import PART_LABEL, RankInfo, RunInfo
from ddltrace.tracer.trace.trace_files import event_path

NOTHING_RECORDED: Final = (
    "nothing was recorded: no process joined a process group of torch.distributed"
)
"""Note on a run without ranks, after its end."""


def account_for(directory: Location, run: RunInfo) -> None:
    """Sets the status of a run to `complete` or `partial` and adds notes with the reasons.

    A run that is complete can have notes as well, on how it was recorded.
    """
    if not run.ranks:
        run.notes.append(NOTHING_RECORDED)
    attempts = sorted({info.attempt for info in run.ranks})
    if len(attempts) > 1:
        run.notes.append(
            f"the job was restarted: attempts {listed(attempts)} are all kept, one after the other"
        )
    # The other ranks are in the other parts of the trace.
    if PART_LABEL not in run.labels:
        run.notes += notes_on_missing_ranks(run)
    run.notes += notes_on_lost_events(directory, run)
    # Each may be a job of its own that numbers its ranks from 0.
    several_roles = len({info.role for info in run.ranks}) > 1
    for info in run.ranks:
        who = f"rank {info.rank}" + (f" of {info.role}" if several_roles and info.role else "")
        who += f" (attempt {info.attempt})" if len(attempts) > 1 else ""
        if info.status == "killed":
            run.notes.append(f"{who} ended without closing its trace{_ending_of(info)}")
        if info.lost_bytes:
            run.notes.append(f"{who}: the last {counted(info.lost_bytes, 'byte', 'is')} unreadable")
        if info.dropped:
            events = counted(info.dropped, "event")
            run.notes.append(f"{who}: {events} dropped: buffer or disk full")
        if info.counters_dropped:
            readings = counted(info.counters_dropped, "reading")
            run.notes.append(f"{who}: {readings} of counters dropped")
        if info.errors:
            errors = counted(len(info.errors), "tracer error")
            run.notes.append(f"{who}: {errors}: {info.errors[0]}")
    run.status = "partial" if run.notes else "complete"
    run.notes += _notes_on_recording_in_python(run) + _notes_on_windows(run)
    # Nothing is missing because of them, but somebody has tried.
    run.notes += [
        f"rank {info.rank}: {counted(info.refused_connections, 'connection', 'was')} refused that "
        "did not prove the job's secret"
        for info in run.ranks
        if info.refused_connections
    ]


def _notes_on_recording_in_python(run: RunInfo) -> list[str]:
    """A note for each reason why ranks on the CPU did without the compiled library."""
    by_reason: dict[str, set[int]] = {}
    for info in run.ranks:
        if info.native_missing and info.device == "cpu":
            by_reason.setdefault(info.native_missing, set()).add(info.rank)
    return [
        f"rank {listed(sorted(ranks))}: recorded in Python, which costs more and is less exact: "
        f"{reason}"
        for reason, ranks in by_reason.items()
    ]


def _notes_on_windows(run: RunInfo) -> list[str]:
    """A note for each set of ranks that recorded the same ranges of steps on demand."""
    by_windows: dict[str, set[int]] = {}
    for info in run.ranks:
        if info.windows:
            by_windows.setdefault(_windows_text(info), set()).add(info.rank)
    return [
        f"rank {listed(sorted(ranks))}: recorded on demand: {text}"
        for text, ranks in by_windows.items()
    ]


def _windows_text(info: RankInfo) -> str:
    """The ranges of steps that a rank recorded, and why, if a trigger began them."""
    texts = []
    for window in info.windows:
        first, stop = window["first"], window["stop"]
        if stop is None:
            steps = f"from step {first} on"
        elif stop - first == 1:
            steps = f"step {first}"
        else:
            steps = f"steps {first} to {stop - 1}"
        if stop is None or stop > first:
            reason = f"; {window['reason']}" if window.get("reason") else ""
            texts.append(f"{steps} ({window['level']}{reason})")
    return ", ".join(texts) or "no step (ddltrace on begins it while the job runs)"


def notes_on_lost_events(directory: Location, run: RunInfo) -> list[str]:
    """A note for every process whose events can no longer be read."""
    return [
        f"rank {info.rank}: what process {info.pid} recorded is gone"
        for info in run.ranks
        if not event_path(directory, info.segment).exists()
    ]


def notes_on_missing_ranks(run: RunInfo) -> list[str]:
    """A note for every attempt of which not all ranks were recorded."""
    sizes: dict[int, int] = {}
    for info in run.ranks:
        sizes[info.attempt] = max(sizes.get(info.attempt, 0), info.world_size)
    notes = []
    for attempt, world_size in sorted(sizes.items()):
        present = {info.rank for info in run.ranks if info.attempt == attempt}
        missing = sorted(set(range(world_size)) - present)
        if missing:
            which = f" in attempt {attempt}" if len(sizes) > 1 else ""
            notes.append(f"no trace of rank {listed(missing)} of {world_size}{which}")
    return notes


def _ending_of(info: RankInfo) -> str:
    """How a process ended, if the launcher observed it."""
    return "" if info.exit_status is None else f": {status_text(info.exit_status)}"


def listed(ranks: Sequence[int]) -> str:
    """The first eight ranks, and how many more there are."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
