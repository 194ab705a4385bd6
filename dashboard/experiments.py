"""The experiments that one dashboard shows: results that may still grow, and their timelines."""

from __future__ import annotations

import threading
from pathlib import Path

from ddltrace.experiments.harness.results import Results
from ddltrace.experiments.harness.results_file import RESULTS_FILE, read
from ddltrace.experiments.harness.results_table import label
from ddltrace.experiments.harness.step_timeline import StepTimeline, median_step_timeline


class OpenExperiment:
    """One experiment's directory, read again whenever its results have changed.

    Attributes:
        number: Its place in the dashboard, from 0.
        title: Its name in the dashboard.
        directory: The directory that holds ``results.json``.
    """

    def __init__(self, number: int, title: str, directory: Path) -> None:
        self.number = number
        self.title = title
        self.directory = directory
        self._lock = threading.Lock()
        self._read_version: str | None = None
        self._results: Results | None = None
        self._steps: dict[str, StepTimeline | None] = {}

    @property
    def results(self) -> Results:
        """The results as they are now.

        Raises:
            TraceError: The file cannot be read or is damaged.
        """
        with self._lock:
            version = self.version
            if self._results is None or version != self._read_version:
                self._results = read(self.directory / RESULTS_FILE)
                self._read_version = version
            return self._results

    @property
    def version(self) -> str:
        """Another text whenever the results have changed."""
        try:
            status = (self.directory / RESULTS_FILE).stat()
        except OSError:
            return "gone"
        return f"{status.st_mtime_ns}-{status.st_size}"

    def steps(self) -> dict[str, StepTimeline]:
        """The median step of the first finished run of each strategy, by the row's label."""
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
