"""Builds the command line of one run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddltrace.experiments.harness.job_process import ranks_launcher
from ddltrace.experiments.harness.results import UNCHANGED
from ddltrace.experiments.harness.settings import PlannedRun, Settings
from ddltrace.experiments.observation.outcomes import started_path
from ddltrace.experiments.pacing.profile import PROFILE_FILE
from ddltrace.experiments.strategy.plugins import plugin_files
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.emulated_hosts import on_hosts as command_on_hosts


def job_command(planned: PlannedRun, settings: Settings, directory: Path) -> list[str]:
    """``ddltrace run`` with the job behind it.

    Args:
        settings: The settings of the experiment.
        directory: Directory for the trace and the outcome.
    """
    trace = directory / planned.name
    record = [
        *(sys.executable, "-m", "ddltrace", "run", "-o", str(trace), "--force"),
        *("--level", "layer"),
        *(["--keep-command"] if settings.keep_command else []),
        *(part for file in plugin_files(settings.plugins) for part in ("--plugin", file)),
    ]
    if settings.command:
        is_own = planned.strategy == UNCHANGED or planned.strategy in settings.also
        strategy = [] if is_own else ["--strategy", planned.strategy]
        return [
            *record,
            *strategy,
            *_slow(settings),
            *("--steps", str(settings.steps), "--"),
            *command_on_hosts(asdict(settings), settings.command_of(planned.strategy)),
        ]
    outcome = outcome_path(planned, directory)
    worker = _worker(planned, settings, outcome)
    if settings.pace is not None:
        worker += ["--pace", str(directory / PROFILE_FILE)]
    if settings.protocol is not None:
        worker += ["--protocol", settings.protocol]
    return [*record, "--", *_launch(planned, settings, worker, outcome)]


def read_also(texts: Sequence[str], taken: Sequence[str]) -> dict[str, list[str]]:
    """Reads ``NAME=COMMAND`` of ``--also``: the command of each further row.

    Args:
        texts: The values of the option.
        taken: Names of the other rows.

    Raises:
        UsageError: One is not of that form, or its name is taken or that of a strategy.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, command = text.partition("=")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--also {text!r:.80}: the command cannot be read: {error}") from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not words:
            raise UsageError(
                f"--also {text!r:.80}: write NAME=COMMAND, e.g. "
                '--also big="torchrun train.py --bucket 100"; a name has letters, digits, . _ -'
            )
        if name in taken or name in found or _is_strategy(name):
            raise UsageError(f"--also: the name {name!r:.80} is taken; choose another one")
        found[name] = words
    return found


def _is_strategy(name: str) -> bool:
    try:
        parse(name)
    except UsageError:
        return False
    return True


def survives_deaths(spec: str) -> bool:
    """Whether a strategy's job continues when one of its workers dies."""
    rule = parse(spec).synchronization
    return rule is not None and rule.place == "servers"


def check_own_command(command: Sequence[str], cluster: Mapping[str, Any]) -> None:
    """Checks that a user's command can be run.

    Args:
        cluster: The options of the emulated network, by name.

    Raises:
        UsageError: The program does not exist, or the hosts cannot start the command's ranks.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"the job cannot be started: there is no program {command[0]!r:.80}")
    command_on_hosts(cluster, command)


def outcome_path(planned: PlannedRun, directory: Path) -> Path:
    """The file into which rank 0 of a run writes measurements from inside the job."""
    return directory / f"{planned.name}.outcome.json"


def log_path(planned: PlannedRun, directory: Path) -> Path:
    """The file with a run's output."""
    return directory / f"{planned.name}.log"


def _launch(planned: PlannedRun, settings: Settings, worker: list[str], outcome: Path) -> list[str]:
    """The worker behind a launcher of ranks, or on the hosts of the emulated network."""
    if settings.hosts is not None:
        command = command_on_hosts(asdict(settings), [sys.executable, "-m", *worker])
    else:
        assert settings.ranks is not None
        command = [*ranks_launcher(settings.ranks), "-m", *worker]
    if survives_deaths(planned.strategy):
        at = command.index("--")
        command[at:at] = ["--started", str(started_path(outcome))]
    return command


def _worker(planned: PlannedRun, settings: Settings, outcome: Path) -> list[str]:
    measured = settings.measured_steps(planned.strategy)
    return [
        "ddltrace.experiments.harness.worker",
        *("--strategy", planned.strategy, "--outcome", str(outcome)),
        *("--workload", str(settings.workload), "--width", str(settings.width)),
        *("--steps", str(settings.steps), "--warmup", str(measured.start)),
        *("--batch-size", str(settings.batch_size)),
        *("--learning-rate", str(settings.learning_rate), "--seed", str(planned.seed)),
        *_slow(settings),
    ]


def _slow(settings: Settings) -> list[str]:
    return [part for slow in settings.slow for part in ("--slow", slow)]
