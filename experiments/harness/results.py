"""The results of an experiment: its runs, a row per strategy, and how the rows compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

import numpy as np

from ddltrace.analyzer.compare.mean_difference import LEVEL
from ddltrace.analyzer.formatting.units import printable
from ddltrace.experiments.harness.step_intervals import (
    Difference,
    Speedup,
    StepTime,
    Timed,
    compare_rounds,
    half_width,
    means_over_cycles,
    speedup,
    step_time,
)
from ddltrace.experiments.harness.synchronization_report import merged
from ddltrace.experiments.strategy.spec import cycle_steps_of
from ddltrace.experiments.transports.protocols import read_protocol
from ddltrace.tracer.errors import TraceError

T = TypeVar("T")

Status = Literal["complete", "diverged", "failed", "hung"]
"""How a run ended: trained to the end with finite losses; with losses that are not finite; with
an error; ended by the harness because it ran longer than ``--timeout``."""

FINISHED: Final = ("complete", "diverged")
"""Statuses of measured runs, which ``experiment resume`` does not repeat."""


@dataclass(frozen=True)
class Run:
    """One strategy in one round. Unmeasured values are None.

    Times are in microseconds; means are over ranks and steady steps.

    Attributes:
        strategy: The strategy's spec, or a trace's name.
        round: Number of the round, from 1.
        seed: Seed of the weights, the split and the order of the data.
        status: How the run ended: ``complete``, ``diverged`` (its losses are not finite),
            ``failed`` or ``hung`` (it was ended after ``--timeout``).
        reason: Why it did not complete; None if it did.
        trace: The trace's directory, relative to the results' directory; None if the run left no
            trace that can be read.
        first_step: Number of the first steady step.
        step_us: The time that each steady step adds to the job, in order: from the last rank's end
            of the step before to the last rank's end of the step. Where a strategy's rule lets
            ranks make different numbers of steps, the mean over ranks of their own times.
        elapsed_us: End of every step on the lowest rank, warm-up included, from the start of the
            first step; where ranks run ahead of each other, the mean over ranks.
        losses: Mean over ranks of each step's loss, warm-up included; None where it diverged.
        overlap_ratio: Share of communication hidden under computation.
        exposed_us: Communication that is not hidden, per step.
        payload_bytes: Bytes that a rank hands to its messages, per step.
        wire_bytes: Bytes that a rank's sockets sent, per step.
        messages: Messages of a rank, per step.
        encode_us, decode_us: Time that a rank spends in a codec, per step.
        peak_memory_bytes: Largest resident memory of a rank process; of the rank's device if it
            trains on one.
        train_loss: Over all training examples, at the end.
        test_loss: Over the held-out examples, at the end.
        test_accuracy: On the held-out examples, at the end, 0 to 1.
        replicas_identical: Whether all ranks ended with the same parameters to the last bit.
        synchronization: How far ahead of each other workers ran, and whether the rule's promises
            were kept; None if the trace has no clocks.
        choices: What the strategy chose by sizes or measurements: ``auto`` (groups, links and the
            architecture for each size), ``placement`` (loads of the servers and their skew). And
            ``protocol``: the profile that paced the messages, with its sources, and the number and
            times of the messages to rank 0. And ``found``: the schedule that a search or
            calibration has found. And ``experts``, with ``expert``: tokens of all steps by block,
            rank and expert (``tokens``), how many were ``dropped``, as a share (``dropped_share``),
            and the tokens of the rank whose experts had most, over the mean of the ranks
            (``imbalance``, the mean over the blocks).
        calibration: What the strategy searched or measured with messages of its own, apart from
            all other values: ``steps`` up to its end, none of which is measured; ``bytes`` and
            ``messages`` of a rank for it, over the whole run. None if it did not.
        wall_s: Seconds that the job took from its start to its end.
        other_cores: Cores that other processes, and the kernel on its own behalf, kept busy while
            the job ran, in the mean; None where the kernel does not say.
        notes: Restrictions on the validity of the numbers.
    """

    strategy: str
    round: int = 1
    seed: int | None = None
    status: Status = "complete"
    reason: str | None = None
    trace: str | None = None
    first_step: int | None = None
    step_us: list[float] = field(default_factory=list)
    elapsed_us: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    overlap_ratio: float | None = None
    exposed_us: float | None = None
    payload_bytes: float | None = None
    wire_bytes: float | None = None
    messages: float | None = None
    encode_us: float | None = None
    decode_us: float | None = None
    peak_memory_bytes: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    replicas_identical: bool | None = None
    synchronization: dict[str, Any] | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    wall_s: float | None = None
    other_cores: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether it was trained to its last step and measured."""
        return self.status in FINISHED


SMOOTHING: Final = 5
"""Number of steps over which losses are averaged, because the loss of one batch is noisy."""


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """Mean of each step's loss and the losses of the four steps before it.

    None where fewer than `SMOOTHING` steps have been trained or one of them diverged.
    """
    means: list[float | None] = []
    for end in range(1, len(losses) + 1):
        window = [loss for loss in losses[max(0, end - SMOOTHING) : end] if loss is not None]
        means.append(sum(window) / SMOOTHING if len(window) == SMOOTHING else None)
    return means


def time_to_loss(
    losses: Sequence[float | None], elapsed_us: Sequence[float], target: float
) -> float | None:
    """Time from the start of the first step until the smoothed loss is at most `target`.

    Args:
        losses: Loss of each step, warm-up included.
        elapsed_us: End of each step, microseconds from the start of the first one.
        target: The loss to reach.

    Returns:
        Microseconds; None if the loss was not reached, or the steps are not known.
    """
    if len(losses) != len(elapsed_us):
        return None
    for loss, end in zip(smoothed(losses), elapsed_us, strict=True):
        if loss is not None and loss <= target:
            return end
    return None


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
        step_us: The time that each steady step adds to the job, run after run.
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


def difference_to(row: Row, baseline: Row) -> Difference | None:
    """A row's difference in step time to another one; None if too few steps were measured."""
    return compare_rounds(row.timed, baseline.timed)


def speedup_over(row: Row, reference: Row) -> Speedup | None:
    """How many times as fast as another row a row is; None if too few steps were measured."""
    difference = difference_to(row, reference)
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
        **{name: mean_of_all(getattr(run, name) for run in finished) for name in _MEANS},
        peak_memory_bytes=max(peaks, default=None),
        time_to_loss_us=None
        if target_loss is None
        else mean_of_all(time_to_loss(run.losses, run.elapsed_us, target_loss) for run in finished),
        losses=[mean_of_all(step) for step in zip(*(run.losses for run in finished), strict=False)],
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


def exceeds(other_cores: float | None, limit: float | None) -> bool:
    """Whether more cores than the limit are known to be busy with other work; None: no limit."""
    return other_cores is not None and limit is not None and other_cores > limit


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


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """The mean; None if a value is missing or there is none."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


TOLERANCE: Final = 0.01
"""A row reaches another one's loss if its own is higher by at most this share of it."""


@dataclass(frozen=True)
class LossDifference:
    """A row's training loss at the end beside that of a reference row.

    Attributes:
        loss: Mean over the rounds that both have finished.
        reference_loss: That of the reference over the same rounds.
        low, high: Bounds of the interval of `loss` - `reference_loss` over the rounds; None with
            one round.
        verdict: ``reached`` if the interval ends at most `TOLERANCE` above the reference;
            ``higher`` if the mean is above that; else ``undecided``. One round, which has no
            interval, is ``higher`` or ``undecided``.
        reference: The spec of the reference row.
        confidence: Confidence level of the interval, as a fraction.
    """

    loss: float
    reference_loss: float
    low: float | None
    high: float | None
    verdict: Literal["reached", "higher", "undecided"]
    reference: str
    confidence: float = LEVEL


def compare_losses(row: Row, reference: Row) -> LossDifference | None:
    """The loss of a row against that of a reference row.

    Args:
        reference: The row whose loss it should reach.

    Returns:
        The difference; None if it is not known: a finished run has no finite loss, no round is
        finished in both, the rows are of different experiments, or the runs of a round trained
        different numbers of steps or from different seeds.
    """
    if _experiment(row) != _experiment(reference):
        return None
    others = {run.round: run for run in reference.runs if run.is_finished}
    pairs = [
        (run, others[run.round]) for run in row.runs if run.is_finished and run.round in others
    ]
    if any(len(a.losses) != len(b.losses) or a.seed != b.seed for a, b in pairs):
        return None
    values = [(a.train_loss, b.train_loss) for a, b in pairs]
    if not row.runs and not reference.runs and len(row.losses) == len(reference.losses):
        values = [(row.train_loss, reference.train_loss)]
    known = [(a, b) for a, b in values if _is_finite(a) and _is_finite(b)]
    if not known or len(known) != len(values):
        return None
    own, base = np.array(known, dtype=np.float64).T
    mean = float((own - base).mean())
    allowed = TOLERANCE * abs(float(base.mean()))
    half = half_width(own - base) if len(known) > 1 else math.inf
    verdict: Literal["reached", "higher", "undecided"] = "undecided"
    if mean > allowed:
        verdict = "higher"
    elif mean + half <= allowed:
        verdict = "reached"
    return LossDifference(
        loss=float(own.mean()),
        reference_loss=float(base.mean()),
        low=mean - half if math.isfinite(half) else None,
        high=mean + half if math.isfinite(half) else None,
        verdict=verdict,
        reference=reference.strategy,
    )


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _experiment(row: Row) -> str:
    """The name of a row's experiment, which is in its own name where several are combined."""
    return row.strategy.rpartition("/")[0]


def headline(rows: Sequence[Row], reference: Row | None, *, running: bool) -> str:
    """What the experiment has found.

    A row of which a run diverged, failed or hung is not called the fastest.

    Args:
        rows: All rows of the experiment.
        reference: The row to compare with; None if there is none.
        running: Whether runs are still to come.
    """
    timed = [row for row in rows if row.is_sound and row.step_time is not None]
    if reference is None or reference.step_time is None or len(timed) < 2:
        yet = " yet" if running else ""
        return f"No {'two strategies have' if timed else 'strategy has'} finished{yet}."
    name = {row.strategy: printable(label(row)) for row in [*timed, reference]}
    other = name[reference.strategy]
    timed.sort(key=lambda row: row.step_time.us if row.step_time is not None else 0.0)
    fastest = timed[0]
    if fastest is reference:
        return f"No strategy has a shorter step than {other}."
    found = speedup_over(fastest, reference)
    doubt = _doubt(found, reference, other)
    if found is None or doubt:
        return f"{name[fastest.strategy]} has the shortest step{doubt}."
    losses = compare_losses(fastest, reference)
    text = f"{name[fastest.strategy]} is {found.ratio:.2f} times as fast as {other}"
    if losses is None:
        return f"{text}; whether it reaches its loss is not known."
    text += _loss_clause(losses)
    return text if losses.verdict == "reached" else f"{text} {_second(timed[1:], reference, name)}"


def _doubt(found: Speedup | None, reference: Row, other: str) -> str:
    """Why the row with the shortest step is not a winner by its time; empty if it is one."""
    if not reference.is_sound:
        return f", but {other}, with which it is compared, {reference.status}"
    if found is None:
        return f"; too few steps to compare it with {other}"
    if found.over == "steps":
        return ", but one run of each names no winner"
    if found.verdict != "faster":
        return f", but its lead over {other} may be noise"
    return ""


def _second(slower: Sequence[Row], reference: Row, name: Mapping[str, str]) -> str:
    """The fastest of the rows that reached the loss which the fastest of all did not."""
    for row in slower:
        losses, faster = compare_losses(row, reference), speedup_over(row, reference)
        reached = losses is not None and losses.verdict == "reached"
        if row is not reference and reached and faster and faster.verdict == "faster":
            return f"The fastest that did is {name[row.strategy]}: {faster.ratio:.2f} times."
    other = name[reference.strategy]
    return f"None that did is faster than {other} by more than the noise."


def _loss_clause(losses: LossDifference) -> str:
    values = f"{losses.loss:.4g} against {losses.reference_loss:.4g}"
    if losses.verdict == "reached":
        return f" and reached its loss ({values})."
    if losses.verdict == "higher":
        return f", but did not reach its loss ({values})."
    return f", but it is not decided whether it reaches its loss ({values})."


SCHEMA: Final = "ddltrace.experiment/1"

PLAIN: Final = "fifo"
"""The strategy without any optimization: everything is sent after backward."""

UNCHANGED: Final = "unchanged"
"""Name of the row of the user's own job without a strategy."""

_TUNED: Final = frozenset({"ddp", "best_buckets", UNCHANGED})
"""Names of the strategies among which the fastest one is the tuned DDP baseline."""


@dataclass(frozen=True)
class Comparisons:
    """A row beside others; a value is None if it is not known, and for the other row itself.

    Attributes:
        difference: Difference of its step time to the baseline's.
        speedup_plain: Speed-up over the strategy without any optimization.
        speedup_tuned_ddp: Speed-up over tuned DDP.
        loss_difference: Its loss beside that of `Results.reference`.
    """

    difference: Difference | None
    speedup_plain: Speedup | None
    speedup_tuned_ddp: Speedup | None
    loss_difference: LossDifference | None


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

    def plain(self) -> Row | None:
        """The row of the strategy without any optimization."""
        return next((row for row in self.rows if _name(row) == PLAIN), None)

    def tuned_ddp(self) -> Row | None:
        """The fastest of the rows of DistributedDataParallel: with any buckets, nothing else.

        Rows with runs that failed or diverged only if there is no other.
        """
        timed = [
            (not row.is_sound, row.step_time.us, number, row)
            for number, row in enumerate(self.rows)
            if _name(row) in _TUNED and row.step_time is not None
        ]
        return min(timed)[3] if timed else None

    def reference(self) -> Row | None:
        """The row that a winner has to beat: tuned DDP, or the baseline without a DDP row."""
        return self.tuned_ddp() or self.row(self.baseline)

    def headline(self) -> str:
        """The result in one or two sentences."""
        return headline(self.rows, self.reference(), running=self.status == "running")

    def compared(self) -> list[tuple[Row, Comparisons]]:
        """Each row, and how it compares with the others."""
        base, plain, tuned = self.row(self.baseline), self.plain(), self.tuned_ddp()
        reference = self.reference()
        return [
            (
                row,
                Comparisons(
                    _beside(difference_to, row, base),
                    _beside(speedup_over, row, plain),
                    _beside(speedup_over, row, tuned),
                    _beside(compare_losses, row, reference),
                ),
            )
            for row in self.rows
        ]

    def to_json(self) -> dict[str, Any]:
        """The object that is stored in ``results.json`` and printed by ``--json``."""
        plain, tuned = self.plain(), self.tuned_ddp()
        rows = [
            {
                **asdict(row),
                "cycle_steps": row.cycle_steps,
                "step_time": row.step_time and asdict(row.step_time),
                **asdict(comparisons),
            }
            for row, comparisons in self.compared()
        ]
        return {
            "schema": SCHEMA,
            "status": self.status,
            "headline": self.headline(),
            "settings": self.settings,
            "baseline": self.baseline,
            "plain": plain and plain.strategy,
            "tuned_ddp": tuned and tuned.strategy,
            "progress": self.progress,
            "rows": rows,
        }


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


def _beside(compare: Callable[[Row, Row], T | None], row: Row, other: Row | None) -> T | None:
    return None if other is None or row is other else compare(row, other)


def _name(row: Row) -> str:
    """The technique's name if the strategy is that one technique, whatever its parameters."""
    spec = row.strategy.rpartition("/")[2]
    return spec if "+" in spec else spec.partition(":")[0]
