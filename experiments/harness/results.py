"""What an experiment found: measured from traces, kept in ``results.json`` beside them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.trace.opened_trace import Trace, open_trace
from ddltrace.experiments.harness.median_difference import Difference, compare_medians
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.json_files import write_json_atomically
from ddltrace.tracer.trace.trace_files import RUN_FILE

SCHEMA: Final = "ddltrace.experiment/1"
RESULTS_FILE: Final = "results.json"


@dataclass(frozen=True)
class Row:
    """One strategy, or one trace. What was not measured is None.

    Times are of steady steps only, in microseconds.

    Attributes:
        strategy: The strategy's spec, or a trace's name.
        trace: The trace's directory, relative to the results' directory.
        step_us: Wall time of every steady step over all ranks, in order.
        step_us_p50: Their median.
        step_us_p95: Their 95th percentile.
        overlap_ratio: Share of communication hidden under computation.
        exposed_us: Communication that is not hidden, mean per rank and step.
        payload_bytes: What the ranks hand to their messages, mean per rank and step.
        wire_bytes: What the ranks really put on the network by their sockets' counters, mean
            per rank and step.
        messages: Mean per rank and step.
        train_loss: Over all training examples, at the end.
        test_loss: Over the held-out examples, at the end.
        test_accuracy: On the held-out examples, at the end, 0 to 1.
        losses: Mean over ranks of each step's loss, warm-up included; None where it diverged.
        replicas_identical: Whether all ranks ended with the same parameters to the last bit.
        notes: What a reader must know before believing the row.
    """

    strategy: str
    trace: str
    step_us: list[float]
    step_us_p50: float | None
    step_us_p95: float | None
    overlap_ratio: float | None
    exposed_us: float | None
    payload_bytes: float | None
    messages: float | None
    wire_bytes: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    losses: list[float | None] = field(default_factory=list)
    replicas_identical: bool | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Results:
    """An experiment.

    Attributes:
        settings: How it was run; empty for traces that no experiment made.
        rows: In the order in which they were run.
        baseline: The `strategy` of the row with which others are compared.
        status: ``running``, ``complete`` or ``failed``.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    baseline: str | None = None
    status: str = "running"

    def differences(self) -> list[Difference | None]:
        """Each row's difference in step time to the baseline; None for the baseline itself."""
        base = next((row for row in self.rows if row.strategy == self.baseline), None)
        return [
            None if base is None or row is base else compare_medians(row.step_us, base.step_us)
            for row in self.rows
        ]

    def to_json(self) -> dict[str, Any]:
        """The object that is kept in ``results.json`` and printed by ``--json``."""
        rows = [
            {**asdict(row), "difference": difference and asdict(difference)}
            for row, difference in zip(self.rows, self.differences(), strict=True)
        ]
        return {
            "schema": SCHEMA,
            "status": self.status,
            "settings": self.settings,
            "baseline": self.baseline,
            "rows": rows,
        }

    def write(self, directory: Path) -> None:
        """Writes ``results.json``."""
        write_json_atomically(directory / RESULTS_FILE, self.to_json())


def measure(trace: Path, *, steps: range | None, outcome: dict[str, Any] | None = None) -> Row:
    """Measures one trace.

    Args:
        trace: Its directory.
        steps: The steady steps; None leaves it to the analyzer's rule.
        outcome: What the worker wrote, if an experiment made the trace.

    Returns:
        The row, named after the trace's directory.

    Raises:
        TraceError: The trace cannot be read or has none of the steps.
    """
    opened = open_trace(trace)
    analysis = opened.analyze(_steady_steps(opened) if steps is None else steps)
    found = analysis.to_json()
    walls = [float(row["wall_us"]) for row in found["steps"]]
    notes = [str(note) for note in found["trace"].get("notes") or []]
    if steps is not None and len(walls) != len(steps):
        notes.append(f"{len(walls)} of {len(steps)} steady steps are in the trace")
    return Row(
        strategy=trace.resolve().name,
        trace=str(trace),
        step_us=walls,
        step_us_p50=float(np.median(walls)) if walls else None,
        step_us_p95=float(np.percentile(walls, 95)) if walls else None,
        overlap_ratio=found["summary"]["overlap_ratio"],
        notes=notes + _warnings(outcome or {}),
        **_per_rank_and_step(found),
        **_from_outcome(outcome or {}),
    )


def load(path: Path) -> Results:
    """Reads an experiment's directory, or measures a trace.

    Args:
        path: A directory with ``results.json``, or a trace.

    Returns:
        The results; those of a trace have one row.

    Raises:
        TraceError: It is neither, or is damaged.
    """
    file = path / RESULTS_FILE
    if file.is_file():
        return _read(file)
    if (path / RUN_FILE).is_file() or path.is_file():
        return Results(rows=[measure(path, steps=None)], status="complete")
    raise TraceError(
        f"{path} is neither an experiment ({RESULTS_FILE}) nor a trace ({RUN_FILE}); "
        "make one with: ddltrace experiment run -o DIR"
    )


def combine(named: Sequence[tuple[str, Results]], baseline: str | None) -> Results:
    """Puts the rows of several results side by side.

    Args:
        named: Each with a name that tells its rows from the others' rows.
        baseline: The row to compare with; None for the first result's own, or its first row.

    Returns:
        All rows; where there are several results, prefixed with their names.

    Raises:
        TraceError: There is no row of the name `baseline`.
    """
    if len(named) == 1:
        combined = dataclasses.replace(named[0][1])
    else:
        combined = Results(
            rows=[
                dataclasses.replace(
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


def _steady_steps(trace: Trace) -> range | None:
    """The steps that the analyzer's rule calls steady; None if the trace has none."""
    numbers = [row.step for row in trace.analyze().steps if row.steady]
    return range(min(numbers), max(numbers) + 1) if numbers else None


def _per_rank_and_step(found: dict[str, Any]) -> dict[str, Any]:
    steps = len(found["steps"])
    ranks = found["ranks"]

    def mean(key: str) -> float | None:
        values = [row[key] for row in ranks if row.get(key) is not None]
        if not steps or not values or len(values) != len(ranks):
            return None
        return float(sum(values)) / len(values) / steps

    return {
        "exposed_us": mean("exposed_comm_us"),
        "payload_bytes": mean("bytes_sent"),
        "messages": mean("messages"),
    }


def _from_outcome(outcome: dict[str, Any]) -> dict[str, Any]:
    sent = outcome.get("wire_bytes_per_step") or [None]
    complete = all(value is not None for value in sent)
    return {
        "train_loss": _finite(outcome.get("train_loss")),
        "test_loss": _finite(outcome.get("test_loss")),
        "test_accuracy": outcome.get("test_accuracy"),
        "losses": [_finite(loss) for loss in outcome.get("losses", [])],
        "replicas_identical": outcome.get("replicas_identical"),
        "wire_bytes": sum(sent) / len(sent) if complete else None,
    }


def _warnings(outcome: dict[str, Any]) -> list[str]:
    loss = outcome.get("train_loss")
    return ["the training diverged"] if loss is not None and not math.isfinite(loss) else []


def _finite(value: float | None) -> float | None:
    """The value if JSON can hold it: a training that diverged ends in infinities."""
    return value if value is not None and math.isfinite(value) else None


def _read(file: Path) -> Results:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise TraceError(
                f"{file}: schema {value['schema']!r:.80} is not {SCHEMA!r}; "
                "read it with the version of ddltrace that wrote it"
            )
        fields = Row.__dataclass_fields__
        rows = [Row(**{k: v for k, v in row.items() if k in fields}) for row in value["rows"]]
        results = Results(
            settings=dict(value["settings"]),
            rows=rows,
            baseline=value["baseline"],
            status=str(value["status"]),
        )
        _check(results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{file} is damaged: {error!r:.120}") from error
    return results


def _check(results: Results) -> None:
    """Makes sure that what will be reckoned with and shown is of the right type."""
    for row in results.rows:
        if not isinstance(row.strategy, str) or not isinstance(row.notes, list):
            raise TypeError("strategy or notes")
        numbers = [getattr(row, f) for f in _NUMBERS]
        for number in [*row.step_us, *(n for n in numbers if n is not None)]:
            if not isinstance(number, int | float):
                raise TypeError(f"{number!r:.40} is no number")


_NUMBERS: Final = (
    "step_us_p50",
    "step_us_p95",
    "overlap_ratio",
    "exposed_us",
    "payload_bytes",
    "wire_bytes",
    "train_loss",
    "test_accuracy",
)
