"""The results of an experiment: a row per strategy, compared with the baselines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from ddltrace.experiments.harness.loss_curves import time_to_loss
from ddltrace.experiments.harness.processor_time import exceeds
from ddltrace.experiments.harness.run_record import Run
from ddltrace.experiments.harness.step_intervals import (
    Difference,
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
from ddltrace.tracer.errors import TraceError

SCHEMA: Final = "ddltrace.experiment/1"

PLAIN: Final = "fifo"
"""The strategy without any optimization: everything is sent after backward."""

UNCHANGED: Final = "unchanged"
"""Name of the row of the user's own job without a strategy."""

_TUNED: Final = frozenset({"ddp", "best_buckets", UNCHANGED})
"""Names of the strategies among which the fastest one is the tuned DDP baseline."""

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
            train_loss, test_loss, test_accuracy: As those of `Run`.
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
    disturbed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

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


@dataclass
class Results:
    """An experiment.

    Attributes:
        settings: Settings of the experiment; empty for other traces.
        rows: The rows, in the order of the given strategies.
        baseline: The `strategy` of the row with which others are compared.
        status: ``running``, ``complete`` (every run completed), ``failed`` (some did not) or
            ``interrupted``.
        progress: Progress of a running experiment: `done` and `total` runs, and the `strategy`,
            `round` and `started_unix_s` of the run that is `running`, if one is.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    baseline: str | None = None
    status: str = "running"
    progress: dict[str, Any] = field(default_factory=dict)

    def row(self, strategy: str | None) -> Row | None:
        """The row of a strategy; None if there is none."""
        return next((row for row in self.rows if row.strategy == strategy), None)

    def differences(self) -> list[Difference | None]:
        """Each row's difference in step time to the baseline; None for the baseline itself."""
        base = self.row(self.baseline)
        return [
            None if base is None or row is base else compare_rounds(row.timed, base.timed)
            for row in self.rows
        ]

    def plain(self) -> Row | None:
        """The row of the strategy without any optimization."""
        return next((row for row in self.rows if _name(row) == PLAIN), None)

    def tuned_ddp(self) -> Row | None:
        """The fastest of the rows of DistributedDataParallel: with any buckets, nothing else."""
        timed = [
            (row.step_time.us, number, row)
            for number, row in enumerate(self.rows)
            if _name(row) in _TUNED and row.step_time is not None
        ]
        return min(timed)[2] if timed else None

    def speedups(self, reference: Row | None) -> list[Speedup | None]:
        """Each row's speed-up over a reference row; None for the reference itself."""
        found: list[Speedup | None] = []
        for row in self.rows:
            difference = None
            if reference is not None and row is not reference:
                difference = compare_rounds(row.timed, reference.timed)
            found.append(
                None
                if difference is None or reference is None
                else speedup(difference, reference.strategy)
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The object that is stored in ``results.json`` and printed by ``--json``."""
        plain, tuned = self.plain(), self.tuned_ddp()
        rows = [
            {
                **asdict(row),
                "cycle_steps": row.cycle_steps,
                "step_time": row.step_time and asdict(row.step_time),
                "difference": difference and asdict(difference),
                "speedup_plain": over_plain and asdict(over_plain),
                "speedup_tuned_ddp": over_tuned and asdict(over_tuned),
            }
            for row, difference, over_plain, over_tuned in zip(
                self.rows,
                self.differences(),
                self.speedups(plain),
                self.speedups(tuned),
                strict=True,
            )
        ]
        return {
            "schema": SCHEMA,
            "status": self.status,
            "settings": self.settings,
            "baseline": self.baseline,
            "plain": plain and plain.strategy,
            "tuned_ddp": tuned and tuned.strategy,
            "progress": self.progress,
            "rows": rows,
        }


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
        synchronization=merged([r.synchronization for r in finished if r.synchronization]),
        disturbed=[run.round for run in finished if exceeds(run.other_cores, max_other_cores)],
        notes=[
            *dict.fromkeys(note for run in runs for note in run.notes),
            *_notes_of_cycle(finished, cycle),
        ],
        runs=list(runs),
    )


def combine(named: Sequence[tuple[str, Results]], baseline: str | None) -> Results:
    """Combines the rows of several results.

    Args:
        named: The results, each with a name that distinguishes its rows.
        baseline: The row to compare with; None for the first result's own, or its first row.

    Returns:
        All rows; where there are several results, prefixed with their names.

    Raises:
        TraceError: There is no row of the name `baseline`.
    """
    if len(named) == 1:
        combined = replace(named[0][1])
    else:
        combined = Results(
            rows=[
                replace(
                    row,
                    strategy=name if row.strategy == name else f"{name}/{row.strategy}",
                )
                for name, results in named
                for row in results.rows
            ],
            status="complete",
        )
        first_name, first = named[0]
        if first.baseline is not None:
            combined.baseline = f"{first_name}/{first.baseline}"
    if baseline is not None:
        names = [row.strategy for row in combined.rows]
        if baseline not in names:
            raise TraceError(f"there is no row {baseline!r:.80}; there are: {', '.join(names)}")
        combined.baseline = baseline
    elif combined.baseline is None and combined.rows:
        combined.baseline = combined.rows[0].strategy
    return combined


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


def _name(row: Row) -> str:
    """The technique's name if the strategy is that one technique, whatever its parameters."""
    spec = row.strategy.rpartition("/")[2]
    return spec if "+" in spec else spec.partition(":")[0]
