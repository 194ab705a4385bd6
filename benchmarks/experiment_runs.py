"""Runs the experiments of which scripts write tables, and keeps their results."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from page_section import with_interval

from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.experiments.harness.results import Results, Row
from ddltrace.experiments.harness.results_file import read


def keep(directory: Path, kept: Path) -> None:
    """Copies the results of an experiment.

    Args:
        directory: Of the experiment.
        kept: A file that ends in ``.json.gz``.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (directory / RESULTS_FILE).open("rb") as file, gzip.open(kept, "wb") as packed:
        shutil.copyfileobj(file, packed)


def read_kept(kept: Path) -> Results:
    """What `keep` wrote."""
    with tempfile.TemporaryDirectory() as folder, gzip.open(kept) as packed:
        file = Path(folder) / RESULTS_FILE
        file.write_bytes(packed.read())
        return read(file)


def run_or_resume(
    title: str, directory: Path, options: Sequence[str], strategies: Sequence[str]
) -> None:
    """Runs an experiment; one that is in the directory already is resumed with its own settings.

    Args:
        title: Printed before.
        directory: Of its results.
        options: Those of a new experiment.
        strategies: Its strategies.
    """
    command = [sys.executable, "-m", "ddltrace", "experiment"]
    if (directory / RESULTS_FILE).is_file():
        command += ["resume", str(directory)]
    else:
        command += ["run", "-o", str(directory), *options]
        for strategy in strategies:
            command += ["--strategy", strategy]
    print(f"== {title}", flush=True)
    # If a strategy failed, its row says so and the exit status is 1.
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def verify(
    directory: Path, options: Sequence[str], strategies: Sequence[str], ledger: Path
) -> bool:
    """Predicts strategies, writes the predictions down, and runs the strategies.

    Args:
        directory: Of the runs; what is there is removed.
        options: Those of ``ddltrace experiment verify`` that say what is run.
        strategies: The strategies.
        ledger: Gets the predictions and what was measured.

    Returns:
        Whether it was measured.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ddltrace", "experiment", "verify", *options]
    command += ["--ledger", str(ledger), "-o", str(directory)]
    command += [part for spec in strategies for part in ("--strategy", spec)]
    print(f"== {directory.name}", flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        print(f"not measured, exit status {status}", file=sys.stderr)
    return not status


def step_text(row: Row, digits: int = 1) -> str:
    """The time of a step with its interval, ms; the row's status if there is none."""
    time = row.step_time
    if time is None:
        return row.status
    low, high = (None if us is None else us / 1e3 for us in (time.low_us, time.high_us))
    return with_interval(time.us / 1e3, low, high, digits)
