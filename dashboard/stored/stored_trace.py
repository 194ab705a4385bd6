"""Stores and loads the timeline and the analysis of a trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.dashboard.stored.container import ArrayReader, ArrayWriter, InvalidCacheError
from ddltrace.dashboard.stored.place import content_key, file_name, folders, replacing, user_secret
from ddltrace.dashboard.stored.records import Decoder, Encoder
from ddltrace.dashboard.timeline.tracks import Timeline, rank_timelines
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.joined.analyzed import Analyzed
    from ddltrace.analyzer.trace.opened_trace import Trace

FEWEST_EVENTS: Final = 1_000_000
"""Traces with fewer events are read in less time than a process takes to start."""

TIMELINE: Final = "timeline"
ANALYSIS: Final = "analysis"
_TIMES_MORE: Final = 4
"""Share of the memory limit of an analysis that the dashboard uses: one in so many."""


class Stored:
    """The stored timeline and analysis of one trace.

    Args:
        trace: A finished trace in a directory.

    Raises:
        OSError: The trace's files or the user's cache cannot be read.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._secret = user_secret()
        self._key = content_key(trace)
        self._readers: list[ArrayReader] = []

    def release(self) -> None:
        """Takes the parts of the files that were read so far out of this process's memory."""
        for reader in self._readers:
            reader.release()

    def timeline(self) -> Timeline:
        """The timeline; built by another process if it is not stored."""
        found = self._load(TIMELINE)
        parts, origin_ns, notes, damage = found
        self._adopt(origin_ns, notes, damage)
        timeline = Timeline()
        for part in parts:
            timeline.append(part)
        return timeline

    def analyzed(self) -> Analyzed:
        """The analysis; made by another process if it is not stored."""
        analyzed, origin_ns, notes, damage = self._load(ANALYSIS)
        self._adopt(origin_ns, notes, damage)
        result: Analyzed = analyzed
        return result

    def _adopt(self, origin_ns: int, notes: list[str], damage: list[str]) -> None:
        """Gives the trace what it would have learned from reading its events."""
        trace = self._trace
        trace.__dict__["origin_ns"] = origin_ns
        trace.notes += [note for note in notes if note not in trace.notes]
        trace.damage += [note for note in damage if note not in trace.damage]

    def _load(self, kind: str) -> Any:
        if (found := self._read(kind)) is None:
            self._build(kind)
            found = self._read(kind)
        if found is None:
            raise TraceError(f"{self._trace.name} has changed while it was read: open it again")
        return found

    def _read(self, kind: str) -> Any:
        name = file_name(kind, self._secret)
        for folder in folders(self._trace):
            try:
                reader = ArrayReader(folder / name, self._secret)
            except (OSError, InvalidCacheError):
                continue  # it is built again
            if reader.document[:2] == [kind, self._key]:
                self._readers.append(reader)
                return Decoder(reader).decode(reader.document[2])
        return None

    def _build(self, kind: str) -> None:
        """Builds in another process, whose memory is free again when it ends."""
        module = "ddltrace.dashboard.stored.builder"
        command = [sys.executable, "-m", module, kind, str(self._trace.path)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                error = process.communicate()[1].decode("utf-8", "replace").strip()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            reason = error.rpartition("\n")[2][:300] or f"it ended with {process.returncode}"
            raise TraceError(f"{self._trace.name} cannot be read: {reason}")

    def write(self, kind: str, make: Callable[[Encoder], Any]) -> None:
        """Writes a file of a kind.

        Args:
            kind: `TIMELINE` or `ANALYSIS`.
            make: Makes the JSON of the content.
        """
        with replacing(self._trace, file_name(kind, self._secret)) as file:
            writer = ArrayWriter(file, self._secret)
            writer.finish([kind, self._key, make(Encoder(writer))])


def is_worth_storing(trace: Trace) -> bool:
    """Whether a trace is finished, in a directory of its own, and large."""
    counts = [info.events for info in trace.run.ranks]
    return (
        trace.is_stored
        and trace.run.status != "running"
        and all(info.status != "running" for info in trace.run.ranks)
        and sum(filter(None, counts)) >= FEWEST_EVENTS
    )


def encode_timeline(trace: Trace, encoder: Encoder) -> Any:
    """The JSON of a timeline; each rank's arrays are written before the next rank's are kept."""
    parts = ["list", -1, *map(encoder.encode, rank_timelines(trace))]
    return ["tuple", parts, *_learned(trace, encoder)]


def encode_analysis(trace: Trace, encoder: Encoder) -> Any:
    """The JSON of an analysis."""
    return ["tuple", encoder.encode(analyze_in_full(shortened(trace))), *_learned(trace, encoder)]


def shortened(trace: Trace) -> Trace:
    """The same trace, or of one that is too long for memory, its last steps."""
    if trace.step_selection is None:
        return trace
    selection = trace.step_selection.last(_TIMES_MORE)
    view = trace.within(selection.steps)
    view.step_selection = selection
    view.notes = [*trace.notes, selection.note]
    return view


def _learned(trace: Trace, encoder: Encoder) -> Iterator[Any]:
    yield from map(encoder.encode, (trace.origin_ns, trace.notes, trace.damage))
