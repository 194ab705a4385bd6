"""Runs strategies one after the other, each traced, and gathers what the traces say."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from ddltrace.analyzer.formatting.units import time_text
from ddltrace.experiments.harness.results import Results, Row, measure
from ddltrace.experiments.strategy.spec import Strategy
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.exit_status import shell_status

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Settings:
    """What is the same for all strategies of an experiment.

    Attributes:
        workload: Its name.
        width: Its size.
        batch_size: Examples per rank and step.
        learning_rate: Of plain SGD with momentum.
        seed: Of weights, data split and order.
        ranks: Number of rank processes.
        steps: Training steps, warm-up included.
        warmup: Steps at the start that are trained but not measured.
        hosts: Hosts of an emulated network, one rank on each; None for this machine's own.
        bandwidth: Rate of each of its links, such as ``400mbit``.
    """

    workload: str
    width: int
    batch_size: int
    learning_rate: float
    seed: int
    ranks: int
    steps: int
    warmup: int
    hosts: int | None = None
    bandwidth: str | None = None

    def __post_init__(self) -> None:
        if not self.warmup < self.steps:
            raise UsageError(f"--steps {self.steps} leaves nothing after --warmup {self.warmup}")


class Interrupted(DdltraceError):
    """A signal ended the experiment; its running job was ended before."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def run_experiment(
    strategies: Sequence[Strategy],
    settings: Settings,
    directory: Path,
    *,
    report: Callable[[str], None],
) -> Results:
    """Trains with each strategy and measures it.

    Args:
        strategies: In the order in which they run; the first is the baseline.
        settings: What they share.
        directory: Where results and traces go; exists and is empty. What is there is
            written after every strategy, so that a later failure costs only what is left.
        report: Called with one line of progress at a time.

    Returns:
        The results, as they stand in the directory.

    Raises:
        DdltraceError: A job failed or was interrupted.
    """
    results = Results(
        settings={**asdict(settings), "ddltrace": version("ddltrace"), "cpus": os.cpu_count()},
        baseline=strategies[0].spec,
    )
    results.write(directory)
    try:
        for number, strategy in enumerate(strategies, 1):
            report(
                f"[{number}/{len(strategies)}] {strategy.spec}: "
                f"{settings.steps} steps on {settings.ranks} ranks"
            )
            outcome = _train(strategy, settings, directory)
            results.settings["torch"] = outcome.get("torch")
            results.settings["gradient_bytes"] = outcome.get("gradient_bytes")
            row = _measure(strategy, settings, directory, outcome)
            results.rows.append(row)
            results.write(directory)
            report(f"      median step {time_text(row.step_us_p50)}")
    except BaseException:
        results.status = "failed"
        results.write(directory)
        raise
    results.status = "complete"
    results.write(directory)
    return results


def _measure(
    strategy: Strategy, settings: Settings, directory: Path, outcome: dict[str, Any]
) -> Row:
    row = measure(
        directory / strategy.slug, steps=range(settings.warmup, settings.steps), outcome=outcome
    )
    return replace(row, strategy=strategy.spec, trace=strategy.slug)


def _train(strategy: Strategy, settings: Settings, directory: Path) -> dict[str, Any]:
    """Runs one traced job and returns what its rank 0 wrote."""
    outcome = directory / f"{strategy.slug}.outcome.json"
    log = directory / f"{strategy.slug}.log"
    command = [
        *(sys.executable, "-m", "ddltrace", "run", "-o", str(directory / strategy.slug)),
        *("--level", "layer", "--"),
        *_launch(settings),
        *_worker(strategy, settings, outcome),
    ]
    status = _run_to_its_end(command, log)
    if status != 0 or not outcome.is_file():
        raise DdltraceError(_explain_failure(strategy, status, log))
    value: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    return value


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


def _worker(strategy: Strategy, settings: Settings, outcome: Path) -> list[str]:
    return [
        "ddltrace.experiments.harness.worker",
        *("--strategy", strategy.spec, "--outcome", str(outcome)),
        *("--workload", settings.workload, "--width", str(settings.width)),
        *("--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--batch-size", str(settings.batch_size)),
        *("--learning-rate", str(settings.learning_rate), "--seed", str(settings.seed)),
    ]


def _run_to_its_end(command: Sequence[str], log: Path) -> int:
    """Runs a command into a log; a signal to us goes to it, and we still wait for its end.

    Raises:
        Interrupted: A signal came.
    """
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            # A Ctrl-C must reach the job once, by way of us.
            start_new_session=True,
        )
        with _forwarding_signals(job) as received:
            status = job.wait()
    if received:
        raise Interrupted(received[0])
    return shell_status(status)


@contextlib.contextmanager
def _forwarding_signals(job: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(number)

    former = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _explain_failure(strategy: Strategy, status: int, log: Path) -> str:
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    # The one line that says why is usually the last exception's.
    reasons = [line for line in lines if "Error: " in line] or lines
    reason = reasons[-1] if reasons else "it printed nothing"
    return f"{strategy.spec}: the job ended with status {status}: {reason:.200} (log: {log})"
