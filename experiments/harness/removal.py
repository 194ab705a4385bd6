"""Removes an experiment, and only an experiment, in place of which another is written."""

from __future__ import annotations

from pathlib import Path

from ddltrace.experiments.harness import outcomes, results_file
from ddltrace.experiments.harness.file_names import ARROW_FILE, RESULTS_FILE
from ddltrace.experiments.harness.job_command import log_path, outcome_path
from ddltrace.experiments.harness.run_plan import plan_runs
from ddltrace.experiments.harness.runner import settings_of
from ddltrace.experiments.observation import observed_ranks
from ddltrace.experiments.pacing.profile import PROFILE_FILE
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.removal import check_not_recorded, is_trace, remove_trace


def is_experiment(directory: Path) -> bool:
    """Whether a directory holds an experiment, and not only a file of that name."""
    try:
        settings_of(results_file.read(directory / RESULTS_FILE), directory)
    except TraceError:
        return False
    return True


def remove_experiment(directory: Path) -> None:
    """Removes the files of an experiment and its traces; other files stay.

    Raises:
        UsageError: A job is still being recorded there.
        OSError: A file cannot be removed.
    """
    settings = settings_of(results_file.read(directory / RESULTS_FILE), directory)
    runs = plan_runs(settings)
    traces = [directory / planned.name for planned in runs]
    traces = [trace for trace in traces if not trace.is_symlink() and is_trace(trace)]
    for trace in traces:
        check_not_recorded(trace)
    for trace in traces:
        remove_trace(trace)
        if not any(trace.iterdir()):
            trace.rmdir()
    for planned in runs:
        outcomes.remove(outcome_path(planned, directory))
        observed_ranks.remove_ranks(directory / f"{planned.name}.observed")
        log_path(planned, directory).unlink(missing_ok=True)
    # The results go last: without them, the rest would not be known to be an experiment.
    for name in (ARROW_FILE, PROFILE_FILE, RESULTS_FILE):
        (directory / name).unlink(missing_ok=True)
