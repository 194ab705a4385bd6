"""A progress bar with the remaining time, on terminals only."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import click

from ddltrace.analyzer.formatting.units import printable
from ddltrace.experiments.harness.results import Run
from ddltrace.experiments.harness.run_plan import PlannedRun


class ProgressBar:
    """Shows the current run and the remaining time on standard error."""

    def __init__(self, *, total: int, done: int = 0) -> None:
        """Describes the bar; it appears inside the ``with`` block if there is a terminal.

        Args:
            total: Number of runs of the experiment.
            done: Number of runs that exist already.
        """
        self._bar: Any = None
        self._total = total
        self._done = done

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._bar = click.progressbar(
                length=self._total - self._done,
                label="runs",
                file=sys.stderr,
                show_pos=True,
                show_eta=True,
                item_show_func=lambda text: text,
                width=24,
            )
            self._bar.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, value, traceback)

    def start(self, planned: PlannedRun) -> None:
        """Names the run that starts."""
        if self._bar is not None:
            self._bar.update(0, f"{printable(planned.strategy)}, round {planned.round}")
            self._bar.render_progress()

    def end(self, run: Run) -> None:
        """Counts a run."""
        if self._bar is not None:
            self._bar.update(1, f"{printable(run.strategy)}: {run.status}")
