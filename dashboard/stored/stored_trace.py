"""Stores and loads the timeline, the analysis and the slack of a large trace.

Other processes build them: ``python -m ddltrace.dashboard.stored.stored_trace TRACE
analysis|slack|PART...``, where a part is written as ``NAME:RANK-RANK``, with its first and last
rank. Such a process prints the number of events that it has read since the last such line, and
``part NAME`` when a part is complete.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.engine.engine import EmbeddedEngine
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.stored.cache import ArrayReader, Cache
from ddltrace.dashboard.stored.records import Decoder, Encoder
from ddltrace.dashboard.timeline.tracks import Timeline, build_rank
from ddltrace.tracer.errors import DdltraceError, TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analyzed
    from ddltrace.analyzer.slack import SlackRow
    from ddltrace.analyzer.trace.opened_trace import Trace

FEWEST_EVENTS: Final = 1_000_000
"""Traces with fewer events are read in less time than a process takes to start."""

ANALYSIS: Final = "analysis"
SLACK: Final = "slack"
_MODULE: Final = "ddltrace.dashboard.stored.stored_trace"
_FEWEST_IN_PART: Final = 1_000_000
_MOST_PARTS: Final = 16
_BYTES_PER_EVENT: Final = 150
_BYTES_AT_ONCE: Final = 1 << 30
"""Memory that all processes that build may need together, if there are several."""
_alone: Final = threading.Lock()
"""Held while a process builds, if two would need more than that."""

_MAPPED_BYTES: Final = 300 << 20
"""Of files mapped into memory by this process; beyond that they are released."""
_SPARING: Final = {
    # Arrays of a builder are large and soon freed: without these, the C library and Arrow keep
    # much of their memory, since it may be used again.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_ARENA_MAX": "2",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment of builders, unless the user has set it."""

_TIMES_MORE: Final = 4
"""Divisor of an analysis's memory limit for the dashboard."""


class Progress:
    """Counts the events that were read, for a page that waits for them.

    Args:
        events: How many there are.

    Attributes:
        is_under_way: Whether someone reads them now.
    """

    def __init__(self, events: int) -> None:
        self._events = events
        self._read = 0
        self.is_under_way = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds some events that were read."""
        with self._lock:
            self._read = min(self._events, self._read + count)

    def to_json(self) -> dict[str, int | bool]:
        """The same as an object for the browser."""
        return {"events": self._events, "read": self._read, "under_way": self.is_under_way}


class Stored:
    """The stored timeline and analysis of one trace.

    The timeline is stored in parts, each of some ranks, so that several processes build it at
    once, and what is complete can be shown.

    Args:
        trace: A finished trace in a directory.

    Attributes:
        parts: The ranks of each part of the timeline.
        reading: How far the events are read for the timeline.
        measuring: How far they are read for the analysis.

    Raises:
        OSError: The trace's files or the user's cache cannot be read.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._cache = Cache(trace)
        self._readers: list[ArrayReader] = []
        self.parts = _parts_of(trace)
        events = sum(info.events or 0 for info in trace.run.ranks)
        self.reading, self.measuring = Progress(events), Progress(events)

    def release(self) -> None:
        """Releases the parts of the files that were read so far from this process's memory."""
        for reader in self._readers:
            reader.release()

    def trim(self) -> None:
        """The same, if they have become many."""
        if _mapped_bytes() > _MAPPED_BYTES:
            self.release()

    def stored_parts(self) -> list[list[Timeline] | None]:
        """The parts of the timeline that are stored: of each the timelines of its ranks."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(self._read, map(self._kind, range(len(self.parts)))))

    def build_parts(
        self, numbers: Sequence[int], came: Callable[[int, list[Timeline]], None]
    ) -> None:
        """Builds some parts of the timeline: in as many processes as there are cores and as
        `_BYTES_AT_ONCE` allows, or by the tasks of the trace's engine, if that executes them
        elsewhere.

        Args:
            numbers: Numbers of the parts.
            came: Called with each part's number and the timelines of its ranks.

        Raises:
            TraceError: A part cannot be built.
        """
        self.reading.is_under_way = True
        if self._is_elsewhere:
            for number in numbers:
                self.write_part(self._kind(number), self.parts[number])
                self.reading.add(_events_of(self._trace, self.parts[number]))
                came(number, self._built(self._kind(number)))
        else:
            self._build_in_processes(numbers, came)
        self.reading.is_under_way = False
        self._cache.remove_others()

    def _build_in_processes(
        self, numbers: Sequence[int], came: Callable[[int, list[Timeline]], None]
    ) -> None:
        names = {self._kind(number): number for number in numbers}

        def heard(line: str) -> None:
            if line.startswith("part "):
                name = line.removeprefix("part ")
                came(names[name], self._built(name))
            else:
                self.reading.add(int(line))

        workers = min(os.cpu_count() or 1, len(numbers), self._fitting)
        wanted = [
            f"{name}:{self.parts[number][0]}-{self.parts[number][-1]}"
            for name, number in names.items()
        ]
        with ThreadPoolExecutor(workers) as pool:
            shares = [wanted[first::workers] for first in range(workers)]
            list(pool.map(lambda share: self._build(share, heard), shares))

    @property
    def _fitting(self) -> int:
        """How many processes may build at once, by the memory that the largest part may need."""
        largest = max(_events_of(self._trace, part) for part in self.parts)
        return max(1, _BYTES_AT_ONCE // (_BYTES_PER_EVENT * largest + 1))

    @property
    def has_analysis(self) -> bool:
        """Whether there is a file of the analysis, valid or not."""
        return self._cache.has(ANALYSIS)

    def analyzed(self) -> Analyzed:
        """The analysis; if it is not stored, built by another process or by the trace's engine.

        Raises:
            TraceError: It cannot be built.
        """
        if (found := self._read(ANALYSIS)) is None:
            self.measuring.is_under_way = True
            if self._is_elsewhere:
                self.write_analysis()
            else:
                self._build([ANALYSIS], lambda line: self.measuring.add(int(line)))
            self.measuring.is_under_way = False
            self._cache.remove_others()
            found = self._built(ANALYSIS)
        analyzed: Analyzed = found
        return analyzed

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the trace's engine executes tasks in other processes."""
        return not isinstance(self._trace.engine, EmbeddedEngine)

    def slack_if_stored(self) -> tuple[SlackRow, ...] | None:
        """The slack over the steady steps if it is stored."""
        found: tuple[SlackRow, ...] | None = self._read(SLACK)
        return found

    def slack(self) -> tuple[SlackRow, ...]:
        """The slack; if it is not stored, found by another process or by the trace's engine.

        It is found in the stored analysis, which is built if it is missing.

        Raises:
            TraceError: It cannot be built.
        """
        if (found := self.slack_if_stored()) is None:
            if self._is_elsewhere:
                self.write_slack()
            else:
                self._build([SLACK], lambda _: None)
            found = self._built(SLACK)
        return found

    def _kind(self, number: int) -> str:
        return f"timeline-{number}of{len(self.parts)}"

    def _read(self, kind: str) -> Any:
        """What is stored of a kind; None if it has to be built."""
        reader = self._cache.read(kind)
        if reader is None:
            return None
        self._readers.append(reader)
        with _collector_paused():
            found, origin_ns, notes, damage = Decoder(reader).decode(reader.document)
        # What reading the events would have set.
        trace = self._trace
        trace.__dict__["origin_ns"] = origin_ns
        trace.notes += [note for note in notes if note not in trace.notes]
        trace.damage += [note for note in damage if note not in trace.damage]
        return found

    def _built(self, kind: str) -> Any:
        """What was just stored of a kind."""
        if (found := self._read(kind)) is None:
            raise TraceError(f"{self._trace.name} has changed while it was read: open it again")
        return found

    def _build(self, wanted: Sequence[str], heard: Callable[[str], None]) -> None:
        """Builds in another process, whose memory is free again when it ends.

        Args:
            wanted: `ANALYSIS`, `SLACK` or parts, see above.
            heard: Called with each line that it prints.
        """
        command = [sys.executable, "-m", _MODULE, str(self._trace.path), *wanted]
        pipe = subprocess.PIPE
        with (
            _alone if self._fitting == 1 else nullcontext(),
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",
                env={**_SPARING, **os.environ},
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    heard(line.strip())
                error = process.communicate()[1].strip()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            reason = error.rpartition("\n")[2][:300] or f"it ended with {process.returncode}"
            raise TraceError(f"{self._trace.name} cannot be read: {reason}")

    def write_part(self, name: str, ranks: Sequence[int]) -> None:
        """Builds and writes a part of the timeline; a rank's arrays are written before the next's.

        Args:
            name: Name of the part.

        Raises:
            OSError: It cannot be written.
        """
        trace = self._trace

        def encode(encoder: Encoder) -> Any:
            task = partial(_timeline, origin_ns=trace.origin_ns)
            doing = "building timelines"
            timelines = trace.map_ranks(task, doing, ranks, one_at_a_time=True)
            return ["list", -1, *map(encoder.encode, timelines)]

        self._write(name, encode)

    def write_analysis(self) -> None:
        """Makes and writes the analysis.

        Raises:
            OSError: It cannot be written.
        """
        from ddltrace.analyzer.analysis import analyze_in_full

        self._write(
            ANALYSIS, lambda encoder: encoder.encode(analyze_in_full(shortened(self._trace)))
        )

    def write_slack(self) -> None:
        """Finds and writes the slack.

        Raises:
            OSError: It cannot be written.
        """
        from ddltrace.analyzer.slack import slack_rows

        rows = slack_rows(shortened(self._trace), self.analyzed())
        self._write(SLACK, lambda encoder: encoder.encode(rows))

    def _write(self, kind: str, encode: Callable[[Encoder], Any]) -> None:
        trace = self._trace
        with self._cache.writing(kind) as writer:
            encoder = Encoder(writer)
            content = encode(encoder)
            learned = trace.origin_ns, trace.notes, trace.damage
            writer.finish(["tuple", content, *map(encoder.encode, learned)])


def _timeline(trace: Trace, *, origin_ns: int) -> Timeline:
    """The timeline of a trace's only rank."""
    (rank,) = trace.ranks
    return build_rank(trace, rank, origin_ns)


def _parts_of(trace: Trace) -> list[list[int]]:
    """The ranks of each part: consecutive ones, with enough events for a process of its own."""
    events = {rank: _events_of(trace, [rank]) for rank in trace.ranks}
    least = max(_FEWEST_IN_PART, sum(events.values()) // _MOST_PARTS)
    parts: list[list[int]] = []
    for rank in trace.ranks:
        if not parts or sum(events[other] for other in parts[-1]) >= least:
            parts.append([])
        parts[-1].append(rank)
    return parts


def _events_of(trace: Trace, ranks: Sequence[int]) -> int:
    return sum(info.events or 0 for info in trace.run.ranks if info.rank in ranks)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, which would look through all new records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _mapped_bytes() -> int:
    """Bytes of mapped files that are in this process's memory; 0 if unknown."""
    try:
        shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[2]
    except OSError:
        return 0
    return int(shared) * os.sysconf("SC_PAGE_SIZE")


def is_worth_storing(trace: Trace) -> bool:
    """Whether a trace is finished, in a directory of its own, and large."""
    counts = [info.events for info in trace.run.ranks]
    return (
        trace.is_stored
        and trace.run.status != "running"
        and all(info.status != "running" for info in trace.run.ranks)
        and sum(filter(None, counts)) >= FEWEST_EVENTS
    )


def shortened(trace: Trace) -> Trace:
    """The same trace, or the last steps of a trace that is too long for memory."""
    if trace.step_selection is None:
        return trace
    selection = trace.step_selection.last(_TIMES_MORE)
    view = trace.within(selection.steps)
    view.step_selection = selection
    view.notes = [*trace.notes, *filter(None, [selection.note])]
    return view


def report(line: str) -> None:
    """Prints a line in one call: several threads read, and `print` writes line ends separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(path: str, *wanted: str) -> None:
    """Builds some parts, the analysis or the slack."""
    trace = open_trace(path)
    trace.on_read = lambda count: report(str(count))
    stored = Stored(trace)
    if wanted == (ANALYSIS,):
        os.nice(5)  # the timeline is complete earlier
        stored.write_analysis()
        return
    if wanted == (SLACK,):
        stored.write_slack()
        return
    os.nice(2)  # the server and the browser draw meanwhile
    for part in wanted:
        name, _, ranks = part.rpartition(":")
        first, _, last = ranks.partition("-")
        stored.write_part(name, [r for r in trace.ranks if int(first) <= r <= int(last)])
        report(f"part {name}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (DdltraceError, OSError) as failure:
        sys.exit(str(failure))
