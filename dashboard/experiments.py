"""The experiments of one dashboard: results that may still grow, and their timelines.

The modules that read results are imported on first use: most dashboards show no experiment.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.rank_breakdowns import Breakdown, rank_breakdowns
from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    from ddltrace.experiments.harness.results import Results
    from ddltrace.experiments.harness.step_timeline import StepTimeline

MISSING: Final = "missing"
"""The version of missing results."""


class OpenExperiment:
    """One experiment's directory, read again whenever its results have changed.

    Attributes:
        number: Its index in the dashboard, from 0.
        title: Its name in the dashboard.
        directory: The directory that holds ``results.json``.
        was_started_here: Whether this dashboard started it, so that its results may be missing.
    """

    def __init__(
        self, number: int, title: str, directory: Path, *, was_started_here: bool = False
    ) -> None:
        self.was_started_here = was_started_here
        self.number = number
        self.title = title
        self.directory = directory
        self._lock = threading.Lock()
        self._read_version: str | None = None
        self._results: Results | None = None
        self._steps: dict[str, StepTimeline | None] = {}
        self._breakdowns: dict[str, list[Breakdown]] = {}

    @property
    def results(self) -> Results:
        """The current results.

        Raises:
            TraceError: The file cannot be read or is damaged.
        """
        from ddltrace.experiments.harness.results_file import read

        with self._lock:
            version = self.version
            if self._results is None or version != self._read_version:
                self._results = read(self.directory / RESULTS_FILE)
                self._read_version = version
            return self._results

    @property
    def version(self) -> str:
        """A text that changes with the results."""
        try:
            status = (self.directory / RESULTS_FILE).stat()
        except OSError:
            return MISSING
        return f"{status.st_mtime_ns}-{status.st_size}"

    def breakdowns(self) -> dict[str, list[Breakdown]]:
        """Where a step's time goes in each strategy's first finished run, by the row's label.

        Strategies whose traces cannot be analyzed are left out.
        """
        from ddltrace.experiments.harness.results import label

        found: dict[str, list[Breakdown]] = {}
        for row in self.results.rows:
            run = next((run for run in row.runs if run.is_finished and run.trace), None)
            if run is None or run.trace is None:
                continue
            with self._lock:
                if run.trace not in self._breakdowns:
                    self._breakdowns[run.trace] = self._breakdown(run.trace)
                if rows := self._breakdowns[run.trace]:
                    found[label(row)] = rows
        return found

    def _breakdown(self, name: str) -> list[Breakdown]:
        path = (self.directory / name).resolve()
        if not path.is_relative_to(self.directory.resolve()):
            return []  # a damaged file could name a folder elsewhere
        from ddltrace.analyzer.analysis import analyze_in_full

        try:
            return rank_breakdowns(analyze_in_full(open_trace(path)))
        except DdltraceError:
            return []

    def steps(self) -> dict[str, StepTimeline]:
        """The median step of the first finished run of each strategy, by the row's label."""
        from ddltrace.experiments.harness.results import label
        from ddltrace.experiments.harness.step_timeline import median_step_timeline

        found: dict[str, StepTimeline] = {}
        for row in self.results.rows:
            run = next((run for run in row.runs if run.is_finished and run.trace), None)
            if run is None or run.trace is None:
                continue
            with self._lock:
                if run.trace not in self._steps:
                    self._steps[run.trace] = median_step_timeline(run, self.directory)
                step = self._steps[run.trace]
            if step is not None:
                found[label(row)] = step
        return found
