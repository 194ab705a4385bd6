"""A timeline that is shown while it is built: first a sample, then complete ranks, then all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ddltrace.dashboard.timeline.coarse import coarse_timelines
from ddltrace.dashboard.timeline.tracks import Timeline, build_timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.dashboard.stored.stored_trace import Stored


class GrowingTimeline:
    """The timeline of a trace in stages, each with more events than the one before.

    Built by a thread of its own, from the first call of any method on.

    Args:
        stored: Gives its stored files; they are None where the trace is not stored.
    """

    def __init__(self, trace: Trace, stored: Callable[[], Stored | None]) -> None:
        self._trace = trace
        self._stored = stored
        self._changed = threading.Condition()
        self._stages: list[Timeline] = []
        self._is_whole = False
        self._error: Exception | None = None
        self._has_begun = False

    def whole(self) -> Timeline:
        """The whole timeline; waits for it.

        Raises:
            TraceError: The trace cannot be read.
        """
        return self._wait(lambda: self._is_whole)

    def stage(self, number: int) -> Timeline:
        """A stage of the timeline.

        Raises:
            ValueError: There is no such stage.
        """
        if not 0 <= number < len(self._stages):
            raise ValueError(f"the timeline has {len(self._stages)} stages")
        return self._stages[number]

    def stages(self) -> dict[str, Any]:
        """How many stages there are, at least one, and whether the last one is the whole.

        Raises:
            TraceError: The trace cannot be read.
        """
        self._wait(lambda: bool(self._stages))
        stored = self._stored()
        with self._changed:
            if self._error is not None:
                raise self._error
            return {
                "stages": len(self._stages),
                "whole": self._is_whole,
                "reading": None if stored is None else stored.reading.to_json(),
            }

    def _wait(self, reached: Callable[[], bool]) -> Timeline:
        with self._changed:
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._run, name="timeline", daemon=True).start()
            self._changed.wait_for(lambda: reached() or self._error is not None)
            if self._error is not None and not reached():
                raise self._error
            return self._stages[-1]

    def _run(self) -> None:
        try:
            stored = self._stored()
            if stored is None:
                self._add(build_timeline(self._trace), is_whole=True)
            else:
                self._build(stored)
        except Exception as error:  # noqa: BLE001 - raised where the timeline is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _build(self, stored: Stored) -> None:
        found = stored.stored_parts()
        missing = [number for number, part in enumerate(found) if part is None]
        if missing:
            coarse = coarse_timelines(self._trace)
            self._add(_joined(stored, found, coarse))
            lock = threading.Lock()

            def came(number: int, part: list[Timeline]) -> None:
                with lock:
                    found[number] = part
                    if any(part is None for part in found):
                        self._add(_joined(stored, found, coarse))

            stored.build_parts(missing, came)
        self._add(_joined(stored, found, {}), is_whole=True)

    def _add(self, timeline: Timeline, *, is_whole: bool = False) -> None:
        with self._changed:
            self._stages.append(timeline)
            self._is_whole = is_whole
            self._changed.notify_all()


def _joined(
    stored: Stored, found: list[list[Timeline] | None], coarse: dict[int, Timeline]
) -> Timeline:
    """The timeline of the parts that are complete, and of samples of the other ranks."""
    timeline = Timeline()
    for ranks, part in zip(stored.parts, found, strict=True):
        own = [coarse[rank] for rank in ranks if rank in coarse] if part is None else part
        for rank in own:
            timeline.append(rank)
    return timeline
