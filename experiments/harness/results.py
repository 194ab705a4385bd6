"""The results of an experiment: a row per strategy, compared with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ddltrace.experiments.harness.headline import headline
from ddltrace.experiments.harness.loss_comparison import LossDifference, compare_losses
from ddltrace.experiments.harness.row import Row, speedup_over
from ddltrace.experiments.harness.step_intervals import (
    Difference,
    Speedup,
    compare_rounds,
)
from ddltrace.tracer.errors import TraceError

SCHEMA: Final = "ddltrace.experiment/1"

PLAIN: Final = "fifo"
"""The strategy without any optimization: everything is sent after backward."""

UNCHANGED: Final = "unchanged"
"""Name of the row of the user's own job without a strategy."""

_TUNED: Final = frozenset({"ddp", "best_buckets", UNCHANGED})
"""Names of the strategies among which the fastest one is the tuned DDP baseline."""


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

    def loss_differences(self) -> list[LossDifference | None]:
        """Each row's loss beside that of `reference`; None for the reference itself."""
        reference = self.reference()
        return [
            None if reference is None or row is reference else compare_losses(row, reference)
            for row in self.rows
        ]

    def speedups(self, reference: Row | None) -> list[Speedup | None]:
        """Each row's speed-up over a reference row; None for the reference itself."""
        return [
            None if reference is None or row is reference else speedup_over(row, reference)
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
                "difference": difference and asdict(difference),
                "speedup_plain": over_plain and asdict(over_plain),
                "speedup_tuned_ddp": over_tuned and asdict(over_tuned),
                "loss_difference": loss and asdict(loss),
            }
            for row, difference, over_plain, over_tuned, loss in zip(
                self.rows,
                self.differences(),
                self.speedups(plain),
                self.speedups(tuned),
                self.loss_differences(),
                strict=True,
            )
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


def _name(row: Row) -> str:
    """The technique's name if the strategy is that one technique, whatever its parameters."""
    spec = row.strategy.rpartition("/")[2]
    return spec if "+" in spec else spec.partition(":")[0]
