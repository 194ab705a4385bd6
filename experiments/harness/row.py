"""A row of an experiment's results: one strategy over its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from ddltrace.experiments.harness.loss_curves import time_to_loss
from ddltrace.experiments.harness.processor_time import exceeds
from ddltrace.experiments.harness.run_record import Run
from ddltrace.experiments.harness.step_intervals import (
    Speedup,
    StepTime,
    Timed,
    compare_rounds,
    means_over_cycles,
    speedup,
    step_time,
)
from ddltrace.experiments.harness.synchronization_report import merged
from ddltrace.experiments.strategy.spec import cycle_steps_of
from ddltrace.experiments.transports.protocols import read_protocol

RowStatus = Literal["complete", "diverged", "failed", "hung", "incomplete"]
"""The worst status of a row's runs; ``incomplete`` if runs are still to come."""

_MEANS: Final = (
    "overlap_ratio",
    "exposed_us",
    "payload_bytes",
    "wire_bytes",
    "messages",
    "encode_us",
    "decode_us",
    "train_loss",
    "test_loss",
    "test_accuracy",
)


@dataclass(frozen=True)
class Row:
    """One strategy over its runs, or one trace. Unmeasured values are None.

    Times are of steady steps only, in microseconds. A value without another definition is the
    mean over the finished runs.

    Attributes:
        strategy: The strategy's spec, or a trace's name.
        trace: The first run's trace, relative to the results' directory.
        step_us: Wall time of every steady step over all ranks, run after run.
        step_us_p50: Their median. Where a strategy exchanges in some steps only, that of means over
            `cycle_steps` steps in a row.
        step_us_p95: Their 95th percentile.
        overlap_ratio, exposed_us, payload_bytes, wire_bytes, messages, encode_us, decode_us,
            train_loss, test_loss, test_accuracy: As that of `Run`.
        peak_memory_bytes: The largest of the runs.
        losses: Mean over the finished runs of each step's loss, warm-up included; None where a
            run diverged.
        replicas_identical: Whether in every run all ranks ended with the same parameters.
        time_to_loss_us: Time from the first step's start until the smoothed training loss is at
            most the experiment's target loss; None if a run did not reach it.
        status: The worst status of the runs.
        reason: Why a run did not complete.
        paced: Whether the layers waited out given device times in place of computing.
        protocol: The protocol of ``--protocol``, whose profile paced the messages unless it is
            ``tcp``; None without the option.
        runs: Every run, round by round.
        choices: Those of the last finished run.
        calibration: As that of `Run`, of the last finished run that has one.
        synchronization: As that of `Run`, over all finished runs.
        disturbed: Rounds in which other processes kept more cores than the experiment's
            `max_other_cores` busy: the times of these runs are not those of the strategy alone.
        notes: Restrictions on the validity of the numbers.
    """

    strategy: str
    trace: str | None
    step_us: list[float]
    step_us_p50: float | None
    step_us_p95: float | None
    overlap_ratio: float | None
    exposed_us: float | None
    payload_bytes: float | None
    messages: float | None
    wire_bytes: float | None = None
    encode_us: float | None = None
    decode_us: float | None = None
    peak_memory_bytes: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    time_to_loss_us: float | None = None
    losses: list[float | None] = field(default_factory=list)
    replicas_identical: bool | None = None
    status: RowStatus = "complete"
    reason: str | None = None
    paced: bool = False
    protocol: str | None = None
    synchronization: dict[str, Any] | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    disturbed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no run so far diverged, failed or hung."""
        return self.status in ("complete", "incomplete")

    @cached_property
    def cycle_steps(self) -> int:
        """Steps after which the strategy's exchanges repeat; 1 if all steps have the same."""
        return cycle_steps_of(self.strategy.rpartition("/")[2])

    @cached_property
    def timed(self) -> Timed:
        """Step times of the finished runs by round."""
        rounds = {run.round: run.step_us for run in self.runs if run.is_finished and run.step_us}
        if not self.runs and self.step_us:
            rounds = {1: self.step_us}
        return Timed(rounds, self.cycle_steps)

    @cached_property
    def step_time(self) -> StepTime | None:
        """The step time over rounds."""
        return step_time(self.timed)


def speedup_over(row: Row, reference: Row) -> Speedup | None:
    """How many times as fast as another row a row is; None if too few steps were measured."""
    difference = compare_rounds(row.timed, reference.timed)
    return None if difference is None else speedup(difference, reference.strategy)


def label(row: Row) -> str:
    """A row's name: the strategy, marked if it was paced or disturbed."""
    marks = []
    protocol = None if row.protocol is None else read_protocol(row.protocol)
    if row.paced or (protocol is not None and protocol.is_paced):
        marks.append("paced")
    if protocol is not None:
        marks.append(f"{'profile' if protocol.is_paced else 'protocol'} {protocol.name}")
    if row.disturbed:
        marks.append("disturbed")
    return f"{row.strategy} ({', '.join(marks)})" if marks else row.strategy


def summarize(
    strategy: str,
    runs: Sequence[Run],
    *,
    repeats: int | None = None,
    target_loss: float | None = None,
    paced: bool = False,
    protocol: str | None = None,
    max_other_cores: float | None = None,
) -> Row:
    """The row of a strategy from its runs.

    Args:
        strategy: Its spec.
        runs: Its runs so far; may be empty.
        repeats: Planned number of runs; None for the number of `runs`.
        target_loss: The training loss for `Row.time_to_loss_us`.
        paced: Whether the layers waited out given device times.
        protocol: As of `Row`.
        max_other_cores: Cores that other processes may keep busy; None for any number.
    """
    finished = [run for run in runs if run.is_finished]
    steps = [wall for run in finished for wall in run.step_us]
    cycle = cycle_steps_of(strategy)
    means = [
        mean for run in finished if run.step_us for mean in means_over_cycles(run.step_us, cycle)
    ]
    peaks = [run.peak_memory_bytes for run in finished if run.peak_memory_bytes is not None]
    identical = [run.replicas_identical for run in finished]
    status, reason = _status(runs, len(runs) if repeats is None else repeats)
    return Row(
        strategy=strategy,
        trace=next((run.trace for run in runs if run.trace), None),
        step_us=steps,
        step_us_p50=float(np.median(means)) if means else None,
        step_us_p95=float(np.percentile(steps, 95)) if steps else None,
        **{name: _mean(getattr(run, name) for run in finished) for name in _MEANS},
        peak_memory_bytes=max(peaks, default=None),
        time_to_loss_us=None
        if target_loss is None
        else _mean(time_to_loss(run.losses, run.elapsed_us, target_loss) for run in finished),
        losses=[_mean(step) for step in zip(*(run.losses for run in finished), strict=False)],
        replicas_identical=None if None in identical or not identical else all(identical),
        status=status,
        reason=reason,
        paced=paced,
        protocol=protocol,
        choices=finished[-1].choices if finished else {},
        calibration=next((run.calibration for run in reversed(finished) if run.calibration), None),
        synchronization=merged([r.synchronization for r in finished if r.synchronization]),
        disturbed=[run.round for run in finished if exceeds(run.other_cores, max_other_cores)],
        notes=[
            *dict.fromkeys(note for run in runs for note in run.notes),
            *_notes_of_cycle(finished, cycle),
        ],
        runs=list(runs),
    )


def _notes_of_cycle(finished: Sequence[Run], cycle: int) -> list[str]:
    shortest = min((len(run.step_us) for run in finished), default=cycle)
    if shortest >= cycle:
        return []
    return [
        f"it exchanges in cycles of {cycle} steps, and {shortest} were measured: its times and "
        "bytes lack a part of the exchange; give more --steps"
    ]


def _status(runs: Sequence[Run], repeats: int) -> tuple[RowStatus, str | None]:
    for status in ("hung", "failed", "diverged"):
        bad = [run for run in runs if run.status == status]
        if bad:
            which = "" if repeats == 1 else f"round {bad[0].round}: "
            return status, f"{which}{bad[0].reason}"
    return ("complete" if runs and len(runs) >= repeats else "incomplete"), None


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if a value is missing or there is none."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None
