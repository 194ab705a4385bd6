"""The table of an experiment: one row per strategy, with the columns that fit a laptop's screen.

The other columns are in the page as well, hidden until they are asked for, so that a table saved as
CSV always has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.dashboard.widgets import card, table
from ddltrace.experiments.harness.results import label
from ddltrace.experiments.harness.results_table import clock_cells, clocked, speedup_text

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.experiments.harness.results import Results, Row
    from ddltrace.experiments.harness.step_intervals import Difference

_ALL: Final = "all"


@dataclass(frozen=True)
class _Head:
    """The head of a column.

    Attributes:
        text: Shown.
        meaning: Shown when the pointer is on it.
        is_basic: Whether the column is always shown.
    """

    text: str
    meaning: str
    is_basic: bool = True


_HEADS: Final = (
    _Head("strategy", "A click opens the trace of its first run."),
    _Head("step", "Median step time with its 95 % interval."),
    _Head("vs baseline", "Change of the step time against the baseline, with its 95 % interval."),
    _Head("vs plain", "Step time of fifo, which has no optimization, over that of this row."),
    _Head("vs tuned", "Step time of the fastest DDP row over that of this row."),
    _Head("overlap", "Share of communication that computation hides."),
    _Head("exposed", "Communication that is not hidden, per rank and step."),
    _Head("payload", "Bytes that a rank hands to its messages in a step.", is_basic=False),
    _Head("wire", "Bytes that a rank's sockets send in a step."),
    _Head("codec", "Encoding and decoding, per rank and step.", is_basic=False),
    _Head("memory", "Largest memory of a rank's process or device.", is_basic=False),
    _Head("loss", "Training loss at the end."),
    _Head("accuracy", "On held-out data, at the end."),
    _Head("to loss", "Time until the training loss is at most the target loss."),
    _Head("status", "The worst status of the runs.", is_basic=False),
)
_SYNCHRONIZATION_HEADS: Final = tuple(
    _Head(" ".join(filter(None, words)), "See below.", is_basic=False)
    for words in (
        ("staleness,", "mean"),
        ("staleness,", "largest"),
        ("staleness,", "distribution"),
        ("blocked,", "ms"),
        ("updates dropped",),
        ("loss over baseline",),
    )
)


def strategies_card(
    results: Results, experiment: OpenExperiment, workspace: Workspace, address: Address, path: str
) -> Component:
    """The table of all strategies.

    Args:
        experiment: The experiment that they are of.
        workspace: Knows the traces that the rows link to.
        address: Shows all columns if its key ``columns`` is ``all``.
        path: The page's path.
    """
    shows_all = address.text("columns") == _ALL
    heads = list(_HEADS)
    with_clocks = bool(clocked(results))
    if with_clocks:
        heads += _SYNCHRONIZATION_HEADS
    more = [number for number, head in enumerate(heads) if not head.is_basic]
    toggle = dcc.Link(
        "Fewer columns" if shows_all else f"{len(more)} more columns",
        href=address.link(path, columns=None if shows_all else _ALL),
        className="filter",
    )
    shown = table(
        [html.Span(head.text, title=head.meaning) for head in heads],
        _rows(results, experiment, workspace, with_clocks=with_clocks),
        hidden=() if shows_all else more,
    )
    return card(
        "Strategies",
        html.Div(toggle, className="filters"),
        html.Div(shown, className="strategies"),
        hint="A saved CSV file has all columns.",
        wide=True,
    )


def _rows(
    results: Results, experiment: OpenExperiment, workspace: Workspace, *, with_clocks: bool
) -> list[tuple[Any, ...]]:
    plain, tuned = results.plain(), results.tuned_ddp()
    baseline = results.row(results.baseline)
    return [
        (
            _name(row, experiment, workspace),
            _step(row),
            _change(row, results, found.difference),
            speedup_text(row, plain, found.speedup_plain),
            speedup_text(row, tuned, found.speedup_tuned_ddp),
            share_text(row.overlap_ratio),
            time_text(row.exposed_us),
            _bytes(row.payload_bytes),
            _bytes(row.wire_bytes),
            _codec(row),
            _bytes(row.peak_memory_bytes),
            NOT_KNOWN if row.train_loss is None else f"{row.train_loss:.4f}",
            share_text(row.test_accuracy),
            time_text(row.time_to_loss_us),
            row.status,
            *(_clocks(row, baseline) if with_clocks else ()),
        )
        for row, found in results.compared()
    ]


def _name(row: Row, experiment: OpenExperiment, workspace: Workspace) -> Any:
    """The strategy, with a link to its first trace if there is one, and a status that is bad."""
    name = printable(label(row))
    path = experiment.directory / row.trace if row.trace else None
    number = None if path is None else workspace.show_trace(path, experiment)
    text = html.Span(name, title=name)
    shown = text if number is None else dcc.Link(text, href=f"/?trace={number}")
    if row.is_sound or row.step_time is None:
        return shown
    return [shown, " ", html.Em(row.status, className="loss", title=_reason(row))]


def _reason(row: Row) -> str:
    return printable(row.reason) if row.reason else ""


def _step(row: Row) -> Any:
    time = row.step_time
    if time is None:
        reason = _reason(row)
        text = f"{row.status}: {reason}" if reason else row.status
        return html.Span(text, className="clipped", title=text)
    if time.low_us is None or time.high_us is None:
        return time_text(time.us)
    return f"{time_text(time.us)} {_interval(time_text(time.low_us), time_text(time.high_us))}"


def _interval(low: str, high: str) -> str:
    """An interval; a unit that both ends have is written once."""
    number, _, unit = low.partition(" ")
    same = unit and unit == high.partition(" ")[2]
    return f"[{number if same else low}, {high}]"


def _change(row: Row, results: Results, difference: Difference | None) -> Any:
    if row.strategy == results.baseline:
        return "baseline"
    if difference is None:
        return NOT_KNOWN
    interval = f"[{_percent(difference.low)}, {_percent(difference.high)}]"
    text = f"{_percent(difference.relative)} {interval}"
    if not difference.is_clear:
        return f"{text} ~"
    return html.Span(text, className="gain" if difference.relative < 0 else "loss")


def _percent(change: float) -> str:
    return f"{change:+.1%}" if abs(change) < 1 else f"{change:+,.0%}"


def _codec(row: Row) -> str:
    if row.encode_us is None and row.decode_us is None:
        return NOT_KNOWN
    return time_text((row.encode_us or 0) + (row.decode_us or 0))


def _bytes(value: float | None) -> str:
    return NOT_KNOWN if value is None else bytes_text(round(value))


def _clocks(row: Row, baseline: Row | None) -> list[str]:
    """The cells of `_SYNCHRONIZATION_HEADS`; unknown where the row has no clocks."""
    if row.synchronization is None:
        return [NOT_KNOWN] * len(_SYNCHRONIZATION_HEADS)
    return clock_cells(row, baseline)
