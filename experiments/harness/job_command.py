"""The command line of one run."""

from __future__ import annotations

import sys
from pathlib import Path

from ddltrace.experiments.harness.run_plan import PlannedRun
from ddltrace.experiments.harness.settings import Settings


def job_command(planned: PlannedRun, settings: Settings, directory: Path) -> list[str]:
    """``ddltrace run`` with the job behind it.

    Args:
        planned: The run.
        settings: The experiment's.
        directory: Where the trace and the outcome go.
    """
    trace = directory / planned.name
    return [
        *(sys.executable, "-m", "ddltrace", "run", "-o", str(trace), "--force"),
        *("--level", "layer", "--"),
        *_launch(settings),
        *_worker(planned, settings, outcome_path(planned, directory)),
    ]


def outcome_path(planned: PlannedRun, directory: Path) -> Path:
    """The file into which a run's rank 0 writes what only the job knows."""
    return directory / f"{planned.name}.outcome.json"


def log_path(planned: PlannedRun, directory: Path) -> Path:
    """The file with a run's output."""
    return directory / f"{planned.name}.log"


def _launch(settings: Settings) -> list[str]:
    """What stands before the worker's module: torchrun, or the emulated network's launcher."""
    if settings.hosts is not None:
        return [
            *(sys.executable, "-m", "ddltrace.experiments.network.launch"),
            *("--hosts", str(settings.hosts), "--bandwidth", str(settings.bandwidth), "--"),
            *(sys.executable, "-m"),
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(settings.ranks), "-m"),
    ]


def _worker(planned: PlannedRun, settings: Settings, outcome: Path) -> list[str]:
    return [
        "ddltrace.experiments.harness.worker",
        *("--strategy", planned.strategy, "--outcome", str(outcome)),
        *("--workload", str(settings.workload), "--width", str(settings.width)),
        *("--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--batch-size", str(settings.batch_size)),
        *("--learning-rate", str(settings.learning_rate), "--seed", str(planned.seed)),
        *(() if settings.pace is None else ("--pace", settings.pace)),
    ]
