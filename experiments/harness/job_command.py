"""The command line of one run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ddltrace.experiments.harness.results import UNCHANGED
from ddltrace.experiments.harness.run_plan import PlannedRun
from ddltrace.experiments.harness.settings import Settings
from ddltrace.experiments.pacing.profile import PROFILE_FILE
from ddltrace.tracer.errors import UsageError

_LAUNCHER: Final = re.compile(r"(^|/)torchrun$|torch\.distributed\.(run|launch)$")


def job_command(planned: PlannedRun, settings: Settings, directory: Path) -> list[str]:
    """``ddltrace run`` with the job behind it.

    Args:
        planned: The run.
        settings: The experiment's.
        directory: Where the trace and the outcome go.
    """
    trace = directory / planned.name
    record = [
        *(sys.executable, "-m", "ddltrace", "run", "-o", str(trace), "--force"),
        *("--level", "layer"),
    ]
    if settings.command:
        strategy = [] if planned.strategy == UNCHANGED else ["--strategy", planned.strategy]
        return [
            *record,
            *strategy,
            *("--steps", str(settings.steps), "--"),
            *_network(settings),
            *settings.command,
        ]
    outcome = outcome_path(planned, directory)
    worker = _worker(planned, settings, outcome)
    if settings.pace is not None:
        worker += ["--pace", str(directory / PROFILE_FILE)]
    return [*record, "--", *_launch(settings), *worker]


def check_own_command(command: Sequence[str], *, on_hosts: bool) -> None:
    """Makes sure that a user's command can be run as it is asked for.

    Args:
        command: The command.
        on_hosts: Whether it runs once on every host of an emulated network.

    Raises:
        UsageError: The program does not exist, or it would start ranks of its own on each host.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"the job cannot be started: there is no program {command[0]!r:.80}")
    if on_hosts and any(_LAUNCHER.search(word) for word in command[:4]):
        raise UsageError(
            "--hosts starts one rank on each host itself: give it the script, "
            "as in -- python train.py, in place of torchrun"
        )


def outcome_path(planned: PlannedRun, directory: Path) -> Path:
    """The file into which a run's rank 0 writes what only the job knows."""
    return directory / f"{planned.name}.outcome.json"


def log_path(planned: PlannedRun, directory: Path) -> Path:
    """The file with a run's output."""
    return directory / f"{planned.name}.log"


def _launch(settings: Settings) -> list[str]:
    """What stands before the worker's module: torchrun, or the emulated network's launcher."""
    if settings.hosts is not None:
        return [*_network(settings), sys.executable, "-m"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(settings.ranks), "-m"),
    ]


def _network(settings: Settings) -> list[str]:
    """The emulated network's launcher; nothing on this machine's own network."""
    if settings.hosts is None:
        return []
    return [
        *(sys.executable, "-m", "ddltrace.experiments.network.launch"),
        *("--hosts", str(settings.hosts), "--bandwidth", str(settings.bandwidth), "--"),
    ]


def _worker(planned: PlannedRun, settings: Settings, outcome: Path) -> list[str]:
    return [
        "ddltrace.experiments.harness.worker",
        *("--strategy", planned.strategy, "--outcome", str(outcome)),
        *("--workload", str(settings.workload), "--width", str(settings.width)),
        *("--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--batch-size", str(settings.batch_size)),
        *("--learning-rate", str(settings.learning_rate), "--seed", str(planned.seed)),
    ]
