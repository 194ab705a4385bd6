"""Executes an experiment's runs one after the other and stores their results."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import click
import msgspec

from ddltrace.analyzer.formatting.units import printable
from ddltrace.experiments.architectures.parameter_server import SERVER_DIED
from ddltrace.experiments.harness import results_file
from ddltrace.experiments.harness.file_names import ARROW_FILE, RESULTS_FILE
from ddltrace.experiments.harness.job_command import job_command, log_path, outcome_path
from ddltrace.experiments.harness.job_process import (
    Interruptible,
    JobEnd,
    OtherCores,
    run_job,
)
from ddltrace.experiments.harness.measurement import measure
from ddltrace.experiments.harness.results import Results, Row, Run, exceeds, smoothed, summarize
from ddltrace.experiments.harness.settings import PlannedRun, Settings, plan_runs
from ddltrace.experiments.observation import outcomes
from ddltrace.experiments.observation.peak_memory import RankMemory
from ddltrace.experiments.pacing.profile import PROFILE_FILE
from ddltrace.experiments.strategy.plugins import load_recorded
from ddltrace.tracer.errors import DdltraceError, TraceError, UsageError
from ddltrace.tracer.exit_status import status_text
from ddltrace.tracer.launch.emulated_hosts import check_options
from ddltrace.tracer.trace.removal import check_not_recorded, is_trace, remove_trace
from ddltrace.tracer.trace.run_reader import read_run


class ProgressBar:
    """Shows the current run and the remaining time on standard error."""

    def __init__(self, runs: int) -> None:
        """Describes the bar; it appears inside the ``with`` block if there is a terminal.

        Args:
            runs: Number of runs that are to come.
        """
        self._bar: Any = None
        self._runs = runs

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._bar = click.progressbar(
                length=self._runs,
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


_LOOK_S: Final = 0.5
"""Seconds for which other processes are observed before a run is repeated."""

_CLOSING: Final = ("ddltrace: nothing was recorded: ", "ddltrace: trace of ", "ddltrace: next: ")
"""Starts of the lines that the launcher prints after the end of any job."""

_LOGGED: Final = re.compile(r"(?:\[rank\d+\]:\s*)?(?:\[?[IWE]\d{4} \d\d:\d\d:|\S*Warning: )")
"""Starts of lines that PyTorch's loggers and Python's warnings print."""

_NOTE: Final = "ddltrace: note: "
_REFUSED: Final = re.compile(r"(ddltrace: strategy .+ cannot be applied: .+)")
_KILLED: Final = "ended without closing its trace: killed by"
"""In the note of ``ddltrace run`` on a rank that a signal ended."""


def run_experiment(settings: Settings, directory: Path) -> Results:
    """Trains with each strategy in each round and measures every run.

    Args:
        settings: The experiment's; its first strategy is the baseline.
        directory: An existing, empty directory for results and traces.

    Returns:
        The results, as they stand in the directory. A run that failed, diverged or hung is
        part of them.

    Raises:
        Interrupted: A signal was received. Finished runs are kept.
    """
    results = Results(
        settings={**settings.recorded(), "ddltrace": version("ddltrace"), "cpus": os.cpu_count()},
        baseline=settings.strategies[0],
    )
    return _Experiment(results, settings, directory, {}).make_missing_runs()


def resume_experiment(directory: Path) -> Results:
    """Executes the runs of an experiment that are missing or did not finish.

    Args:
        directory: The experiment's.

    Raises:
        TraceError: The directory holds no experiment, or one that is damaged.
        Interrupted: A signal came.
    """
    results = results_file.read(directory / RESULTS_FILE)
    load_recorded(results.settings.get("plugins", ()))
    settings = settings_of(results, directory)
    check_options(asdict(settings))
    if settings.is_masked and not settings.keep_command:
        raise UsageError(
            f"{directory} was recorded without the secrets of its command (***): start it again, "
            "with --keep-command if it is to be resumable"
        )
    kept = {
        (run.strategy, run.round): run
        for row in results.rows
        for run in row.runs
        if run.is_finished
    }
    if results.settings.get("ddltrace") != version("ddltrace"):
        results.settings["resumed_with_ddltrace"] = version("ddltrace")
    return _Experiment(results, settings, directory, kept).make_missing_runs()


def settings_of(results: Results, directory: Path) -> Settings:
    """The settings of saved results.

    Raises:
        TraceError: They are not those of an experiment.
    """
    try:
        return msgspec.convert(results.settings, Settings)
    except (msgspec.ValidationError, DdltraceError) as error:
        raise TraceError(
            f"{directory} cannot be resumed: its settings are damaged: {error}"
        ) from error


class _Experiment:
    """A running experiment: its finished runs and its directory."""

    def __init__(
        self,
        results: Results,
        settings: Settings,
        directory: Path,
        runs: dict[tuple[str, int], Run],
    ) -> None:
        self._results = results
        self._settings = settings
        self._directory = directory
        self._runs = runs
        self._planned = plan_runs(settings)
        self._signals = Interruptible()

    def make_missing_runs(self) -> Results:
        """Executes every missing run; writes the results after each."""
        with (
            _reserved(self._directory),
            ProgressBar(len(self._planned) - len(self._runs)) as bar,
            self._signals.handling(),
        ):
            return self._make_missing_runs(bar)

    def _make_missing_runs(self, progress: ProgressBar) -> Results:
        try:
            self._write("running")
            start = begin = time.monotonic()
            number, decided = 1, [self._make_round(1, progress)]
            while number < self._settings.repeats or self._needs_round(decided, start, begin):
                number, begin = number + 1, time.monotonic()
                if number > self._settings.repeats:
                    self._settings = replace(self._settings, repeats=number)
                    self._results.settings["repeats"] = number
                    self._planned = plan_runs(self._settings)
                decided.append(self._make_round(number, progress))
            self._signals.check()
        except BaseException:
            self._write("interrupted")
            raise
        complete = all(run.status == "complete" for run in self._runs.values())
        self._write("complete" if complete else "failed")
        return self._results

    def _make_round(self, number: int, progress: ProgressBar) -> bool:
        """Executes the missing runs of a round, and once more those that were disturbed.

        A run is repeated only if the machine is quiet by then.

        Returns:
            Whether all differences to the baseline are decided.
        """
        made: list[PlannedRun] = []
        for planned in self._planned:
            key = planned.strategy, planned.round
            if planned.round != number or key in self._runs:
                continue
            made.append(planned)
            self._make(planned, progress)
        for planned in made:
            others = self._runs[planned.strategy, planned.round].other_cores
            limit = self._settings.max_other_cores
            if exceeds(others, limit) and not exceeds(_current_other_cores(), limit):
                self._make(planned, progress)
        self._write("running")
        differences = [found.difference for _, found in self._results.compared()]
        return all(found is None or found.is_decided for found in differences)

    def _make(self, planned: PlannedRun, progress: ProgressBar) -> None:
        key = planned.strategy, planned.round
        self._runs.pop(key, None)  # if this is interrupted, it is missing
        progress.start(planned)
        self._write("running", planned)
        self._signals.check()
        self._runs[key] = _make_run(
            planned, self._settings, self._directory, self._results.settings
        )
        progress.end(self._runs[key])

    def _needs_round(self, decided: list[bool], start: float, begin: float) -> bool:
        """Whether to make a further round: it is not decided twice in a row, and there is time.

        Twice, because each look at the results is another chance to decide falsely.

        Args:
            decided: After each round, whether all differences were decided.
            start: When the first round began, monotonic seconds.
            begin: When the last one began.
        """
        limit = self._settings.max_minutes
        if limit is None or all(decided[-2:]):
            return False
        now = time.monotonic()
        return now + (now - begin) - start <= 60 * limit

    def _write(self, status: str, running: PlannedRun | None = None) -> None:
        rows = [self._row(strategy) for strategy in self._settings.strategies]
        self._results.rows = [row for row in rows if row.runs]
        self._results.status = status
        self._results.progress = {
            "done": len(self._runs),
            "total": len(self._planned),
            "running": running
            and {
                "strategy": running.strategy,
                "round": running.round,
                "started_unix_s": time.time(),
            },
        }
        results_file.write(self._results, self._directory)

    def _row(self, strategy: str) -> Row:
        rounds = range(1, self._settings.repeats + 1)
        return summarize(
            strategy,
            [self._runs[strategy, number] for number in rounds if (strategy, number) in self._runs],
            repeats=self._settings.repeats,
            target_loss=self._settings.target_loss,
            paced=self._settings.pace is not None,
            protocol=self._settings.protocol,
            max_other_cores=self._settings.max_other_cores,
        )


@contextmanager
def _reserved(directory: Path) -> Iterator[None]:
    """Lets no second experiment write into a directory; the lock ends with this process.

    Raises:
        UsageError: An experiment is running there.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"an experiment is running in {directory}: end it first, or choose another "
                "directory with -o"
            ) from None
        except OSError:  # some network file systems lock no directories
            pass
        yield
    finally:
        os.close(descriptor)


def _current_other_cores() -> float | None:
    others = OtherCores()
    time.sleep(_LOOK_S)
    return others.mean()


def _make_run(
    planned: PlannedRun, settings: Settings, directory: Path, about: dict[str, Any]
) -> Run:
    """Executes one run and returns its record, which contains its status."""
    outcome_file = outcome_path(planned, directory)
    outcomes.remove(outcome_file)
    log = log_path(planned, directory)
    memory = RankMemory(directory / planned.name)
    others = OtherCores()
    measured = settings.measured_steps(planned.strategy)
    end = run_job(
        job_command(planned, settings, directory),
        log,
        timeout_s=settings.timeout_s,
        environment=outcomes.environment(outcome_file, warmup=measured.start, steps=settings.steps)
        if settings.command
        else {},
        observe=memory.sample,
    )
    other_cores = others.mean()
    failed = Run(
        strategy=planned.strategy,
        round=planned.round,
        seed=planned.seed,
        status="hung" if end.timed_out else "failed",
        reason=_explain(end, settings, log, _first_to_fail(directory / planned.name)),
        trace=planned.name if (directory / planned.name / "run.json").is_file() else None,
        wall_s=end.wall_s,
        other_cores=other_cores,
    )
    if end.timed_out or end.status != 0:
        return failed
    outcome: dict[str, Any] = {"peak_memory_bytes": list(memory.peaks.values())}
    written = outcomes.read(outcome_file)
    outcome |= written or {}
    if settings.command:
        known = [loss for loss in smoothed(outcome.get("losses", [])) if loss is not None]
        outcome["train_loss"] = known[-1] if known else None
    elif written is None:
        return failed
    for key in ("torch", "gradient_bytes"):
        about[key] = outcome.get(key, about.get(key))
    try:
        run = measure(
            directory / planned.name,
            steps=measured,
            outcome=outcome,
        )
    except TraceError as error:
        return replace(failed, reason=_why_not_measured(error, log))
    return replace(
        run,
        strategy=planned.strategy,
        round=planned.round,
        seed=planned.seed,
        trace=planned.name,
        wall_s=end.wall_s,
        other_cores=other_cores,
    )


def _why_not_measured(error: TraceError, log: Path) -> str:
    """Why a trace has no measurements, with what the tracer noted first, such as a full disk."""
    lines = log.read_text("utf-8", "replace").splitlines()
    notes = [line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE)]
    # The analyzer's usage does not help here.
    reason = str(error).partition("; try --steps")[0].partition(": leave out --steps")[0]
    return "; ".join([f"its trace cannot be measured: {reason}", *notes[:1]])


def _first_to_fail(trace: Path) -> int | None:
    """The rank whose process was the first to end without success; None if it is not known.

    The times are those at which the launcher saw the processes end.
    """
    try:
        infos = read_run(trace).ranks
    except TraceError:
        return None
    last = max((info.attempt for info in infos), default=0)
    failed = [
        (info.ended_ns, info.rank)
        for info in infos
        if info.attempt == last and info.ended_ns is not None and info.exit_status != 0
    ]
    # On several hosts the times are of several clocks.
    same_clock = len({info.clock_domain for info in infos}) == 1
    return min(failed)[1] if failed and same_clock else None


def _explain(end: JobEnd, settings: Settings, log: Path, first: int | None) -> str:
    """Why a job failed, from what it printed.

    Args:
        end: How it ended.
        settings: The experiment's.
        log: What it printed.
        first: The rank that failed first; None if it is not known.
    """
    if end.timed_out:
        return f"no end after {settings.timeout_s:g} s (--timeout); log: {log.name}"
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    # The reason is usually in the last exception's line; a logger's warning is none.
    own = [line for line in lines if not _LOGGED.match(line)] or lines
    reasons = [line for line in own if "Error: " in line] or own[1:]
    reasons = [line for line in reasons if not line.startswith(_CLOSING)] or reasons
    # A rank that ends makes the messages of the others fail, and a dead server those of all.
    if first is not None:
        reasons = [line for line in reasons if line.startswith(f"[rank{first}]: ")] or reasons
    killed = [line.partition(_NOTE)[2] for line in lines if _KILLED in line]
    if first is not None:
        killed = [note for note in killed if note.startswith(f"rank {first} ")]
    reasons = killed or reasons
    reasons = [line for line in lines if SERVER_DIED in line] or reasons
    refused = [match[1] for line in lines if (match := _REFUSED.match(line))]
    reason = (refused or reasons or ["it printed nothing"])[-1]
    return f"the job ended with {status_text(end.status)}: {reason:.200} (log: {log.name})"


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
        UsageError: It is running, or a job is still being recorded there.
        OSError: A file cannot be removed.
    """
    settings = settings_of(results_file.read(directory / RESULTS_FILE), directory)
    runs = plan_runs(settings)
    traces = [directory / planned.name for planned in runs]
    traces = [trace for trace in traces if not trace.is_symlink() and is_trace(trace)]
    with _reserved(directory):
        for trace in traces:
            check_not_recorded(trace)
        for trace in traces:
            remove_trace(trace)
            if not any(trace.iterdir()):
                trace.rmdir()
        for planned in runs:
            outcomes.remove(outcome_path(planned, directory))
            log_path(planned, directory).unlink(missing_ok=True)
        # The results go last: without them, the rest would not be known to be an experiment.
        for name in (ARROW_FILE, PROFILE_FILE, RESULTS_FILE):
            (directory / name).unlink(missing_ok=True)
