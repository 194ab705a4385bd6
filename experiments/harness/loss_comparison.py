"""Compares the training losses at the end of two rows of an experiment, round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ddltrace.analyzer.compare.mean_difference import LEVEL
from ddltrace.experiments.harness.row import Row
from ddltrace.experiments.harness.step_intervals import half_width

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
