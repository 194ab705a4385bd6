"""The result of an experiment in one or two sentences, for its table, pages and JSON.

The fastest strategy is a winner only if it reaches the loss of what it is compared with; otherwise
the sentence says that it does not, or that this is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltrace.analyzer.formatting.units import printable
from ddltrace.experiments.harness.loss_comparison import LossDifference, compare_losses
from ddltrace.experiments.harness.row import Row, label, speedup_over
from ddltrace.experiments.harness.step_intervals import Speedup


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
