"""The charts of the report as plotly figures; a chart is None if the trace has no data for it.

Figures have no colors: every plotly trace has a role (``compute``, ``wait``, ...) in ``meta``, and
the page colors roles from its style sheet, so that light, dark and print modes are consistent. Text
from a trace is passed through `label`, because plotly interprets a subset of HTML.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.formatting.units import bytes_text, printable, share_text, time_text
from ddltrace.analyzer.measures.bandwidth import CostFit
from ddltrace.analyzer.measures.collectives import CollectiveRow
from ddltrace.analyzer.measures.rank_measures import RankRow
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.model import Analysis

MAX_BARS: Final = 240
"""Maximum number of bars; more steps are shown as averages of neighbours."""

MAX_ROWS: Final = 14
"""Bars with a written name that one chart shows."""

MAX_CELLS: Final = 256
"""Rows and columns of the traffic matrix; more ranks than this share them with neighbours."""

MAX_WRITTEN_CELLS: Final = 12
"""Up to this many ranks, the bytes stand in the cells of the traffic matrix."""

_MAX_FITS: Final = 6
"""Operations whose fits one chart shows: it has that many colours."""

_LINE_POINTS: Final = 64

_STEP_NAMED: Final = {"tickprefix": "step ", "showtickprefix": "first"}
"""Axis of steps; a bar's hover label is its label on this axis."""

_UPRIGHT_RANKS: Final = 24
"""From this many ranks on, bars stand upright and lose their names."""

_ROW_HEIGHT: Final = 26
_MAX_LABEL: Final = 44
_US_PER_MS: Final = 1e3


def label(name: object, limit: int = _MAX_LABEL) -> str:
    """Prepares a name for plotly: removes control characters and markup, shortens its middle."""
    text = printable(name)
    if len(text) > limit:
        half = (limit - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return html.escape(text, quote=False)


def step_times(analysis: Analysis) -> go.Figure | None:
    """Wall time of every step, stacked from the parts of its critical path (ms)."""
    rows = analysis.steps
    if not rows:
        return None
    width, x = _bins(rows)
    walls = _binned([row.wall_us for row in rows], width) / _US_PER_MS
    figure = base_figure(height=340)
    for category in CATEGORIES:
        values = _binned([getattr(row.critical_path, f"{category}_us") for row in rows], width)
        if not np.nansum(values):
            continue
        figure.add_bar(
            x=x,
            y=values / _US_PER_MS,
            name=category,
            meta={"role": category},
            customdata=walls,
            hovertemplate="%{y:.3f} of %{customdata:.3f} ms",
        )
    figure.update_layout(barmode="stack", bargap=0.08 if len(x) < 80 else 0, hovermode="x unified")
    if len(x) < 4:
        figure.update_traces(width=0.3)
    figure.update_xaxes(title=_step_title(width), dtick=1 if len(x) < 12 else None, **_STEP_NAMED)
    figure.update_yaxes(title="ms on the critical path", range=[0, _tallest(rows, width) * 1.08])
    _mark_warmup(figure, rows)
    return figure


def overlap_over_steps(analysis: Analysis) -> go.Figure | None:
    """Overlap ratio and the shares of compute, exposed communication and idle, per step.

    None for a single step, which is not a course of time.
    """
    rows = analysis.steps
    lines: tuple[tuple[str, str, Callable[[StepRow], float | None]], ...] = (
        ("overlap ratio", "overlap", lambda row: row.overlap_ratio),
        ("compute on a rank", "compute", lambda row: row.compute_share),
        ("exposed communication on a rank", "exposed", lambda row: row.exposed_comm_share),
        ("idle on a rank", "muted", lambda row: row.idle_share),
    )
    if len(rows) < 2:
        return None
    width, x = _bins(rows)
    figure = base_figure(height=280)
    for name, role, value in lines:
        values = _binned([value(row) for row in rows], width)
        if np.isnan(values).all():
            continue
        figure.add_scatter(
            x=x,
            y=values,
            name=name,
            meta={"role": role},
            mode="lines+markers" if len(x) < 60 else "lines",
            line={"width": 3 if role == "overlap" else 1.6},
            marker={"size": 5},
            hovertemplate="%{y:.1%}",
        )
    if not figure.data:
        return None
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title=_step_title(width), **_STEP_NAMED)
    # Space above the lines for the warm-up mark.
    figure.update_yaxes(tickformat=".0%", range=[0, 1.16], nticks=6)
    _mark_warmup(figure, rows, times=False)
    return figure


def rank_breakdown(analysis: Analysis) -> go.Figure | None:
    """Each rank's device time: parts that are disjoint and sum to its span (ms)."""
    rows = [row for row in analysis.ranks if row.span_us is not None]
    parts: tuple[tuple[str, str, Callable[[RankRow], float | None]], ...] = (
        ("compute alone", "compute", lambda row: _less(row.compute_us, row.overlap_us)),
        ("compute and communication", "overlap", lambda row: row.overlap_us),
        ("exposed communication", "exposed", lambda row: row.exposed_comm_us),
        ("copies", "copy", _copies_alone),
        ("idle", "idle", lambda row: row.idle_us),
    )
    values = [(name, role, [value(row) for row in rows]) for name, role, value in parts]
    return _bars_of_ranks([row.rank for row in rows], values) if rows else None


def idle_causes(analysis: Analysis) -> go.Figure | None:
    """Idle time of each rank by cause, and its waiting in messages (ms)."""
    rows = [row for row in analysis.idle if row.idle_us is not None]
    parts = [
        ("data", "data", [row.data_us for row in rows]),
        ("another rank", "overlap", [row.other_rank_us for row in rows]),
        ("a message", "transfer", [row.message_us for row in rows]),
        ("host", "host", [row.host_us for row in rows]),
        ("process stopped", "unfinished", [row.stopped_us for row in rows]),
        ("unknown", "idle", [row.unknown_us for row in rows]),
        ("another rank, inside of messages", "wait", [row.in_message_us for row in rows]),
    ]
    if not any(value for _, _, values in parts for value in values):
        return None
    return _bars_of_ranks([row.rank for row in rows], parts)


def _bars_of_ranks(
    ranks: Sequence[int], parts: Sequence[tuple[str, str, Sequence[float | None]]]
) -> go.Figure:
    """A stacked bar for each rank.

    Args:
        parts: Name, role and values (us, one for each rank) of the parts of the bars.
    """
    upright = len(ranks) > _UPRIGHT_RANKS
    figure = base_figure(height=320 if upright else 110 + _ROW_HEIGHT * len(ranks))
    names = [rank if upright else f"rank {rank}" for rank in ranks]
    for name, role, times in parts:
        values = _array(times) / _US_PER_MS
        if not np.nansum(values):
            continue
        figure.add_bar(
            x=names if upright else values,
            y=values if upright else names,
            orientation="v" if upright else "h",
            name=name,
            meta={"role": role},
            hovertemplate="%{y:.2f} ms" if upright else "%{x:.2f} ms",
        )
    figure.update_layout(
        barmode="stack", bargap=0 if upright else 0.25, hovermode="x unified" if upright else "y"
    )
    if upright:
        figure.update_xaxes(title="rank")
        figure.update_yaxes(title="ms")
    else:
        figure.update_xaxes(title="ms")
        figure.update_yaxes(autorange="reversed")
    return figure


def wait_against_transfer(analysis: Analysis) -> go.Figure | None:
    """Per kind of collective: median waiting for the last rank against median transfer (ms)."""
    rows = [row for row in analysis.collectives if row.transfer_us is not None]
    rows = sorted(rows, key=total_cost, reverse=True)[:MAX_ROWS]
    if not rows:
        return None
    figure = base_figure(height=110 + _ROW_HEIGHT * len(rows))
    names = distinct([_collective_name(row) for row in rows])
    for name, role, values in (
        ("waiting for the last rank", "wait", [row.wait_us for row in rows]),
        ("transfer", "transfer", [row.transfer_us for row in rows]),
    ):
        figure.add_bar(
            x=_array(values) / _US_PER_MS,
            y=names,
            orientation="h",
            name=name,
            meta={"role": role},
            hovertemplate="%{x:.3f} ms",
        )
    figure.update_layout(barmode="stack", bargap=0.25, hovermode="y unified")
    figure.update_xaxes(title="ms per collective, median")
    figure.update_yaxes(autorange="reversed")
    return figure


def bandwidth_against_size(analysis: Analysis) -> go.Figure | None:
    """Bus bandwidth reached against message size, one color per operation (Gbit/s).

    A dashed line is the bandwidth of the fitted model for large sizes: the limit of the links.
    """
    rows = [row for row in analysis.collectives if row.busbw_gbps and row.bytes]
    if not rows:
        return None
    figure = base_figure(height=320)
    largest = max(row.count for row in rows)
    for number, op in enumerate(sorted({row.op for row in rows})):
        own = sorted((row for row in rows if row.op == op), key=lambda row: row.bytes or 0)
        figure.add_scatter(
            x=[row.bytes for row in own],
            y=[row.busbw_gbps for row in own],
            name=label(op),
            meta={"role": f"series-{number % 6}"},
            mode="markers",
            marker={"size": [7 + 11 * (row.count / largest) ** 0.5 for row in own]},
            customdata=[
                [
                    bytes_text(row.bytes),
                    _times(row.count),
                    label(row.group),
                    time_text(row.transfer_us),
                ]
                for row in own
            ],
            hovertemplate="%{customdata[0]}, %{customdata[1]}, group %{customdata[2]}"
            "<br>%{y:.3f} Gbit/s, transfer %{customdata[3]}",
        )
    sizes = [row.bytes or 0 for row in rows]
    ops = sorted({row.op for row in rows})
    limits = [fit for fit in analysis.cost_fits if fit.op in ops and fit.busbw_gbps]
    for fit in limits[:_MAX_FITS]:
        figure.add_scatter(
            x=[min(sizes), max(sizes)],
            y=[fit.busbw_gbps] * 2,
            name=f"limit, {_fit_name(fit)}",
            meta={"role": f"series-{ops.index(fit.op) % 6}"},
            mode="lines",
            line={"dash": "dash", "width": 1.5},
            hovertemplate="%{y:.3f} Gbit/s, fitted for large sizes",
        )
    figure.update_xaxes(
        title="input of one rank", type="log", **_byte_ticks(min(sizes), max(sizes))
    )
    figure.update_yaxes(title="bus bandwidth, Gbit/s", rangemode="tozero")
    figure.update_layout(showlegend=True)
    return figure


def cost_fits(analysis: Analysis) -> go.Figure | None:
    """Transfer against size: medians as points, fitted models as lines (ms).

    None where no operation has two sizes. A model bends on these logarithmic axes: flat where
    latency rules, rising with the size.
    """
    fits = [fit for fit in analysis.cost_fits if fit.points][:_MAX_FITS]
    if all(len(fit.points) < 2 for fit in fits):
        return None
    figure = base_figure(height=340)
    for number, fit in enumerate(fits):
        name = _fit_name(fit)
        role = {"role": f"series-{number % 6}"}
        sizes = [point.bytes for point in fit.points]
        figure.add_scatter(
            x=sizes,
            y=[point.transfer_us / _US_PER_MS for point in fit.points],
            name=name,
            legendgroup=name,
            meta=role,
            mode="markers",
            marker={"size": 8},
            customdata=[
                [bytes_text(point.bytes), time_text(point.transfer_us), point.samples]
                for point in fit.points
            ],
            hovertemplate="%{customdata[0]}: %{customdata[1]}, median of %{customdata[2]}",
        )
        if fit.latency_us is None:
            continue
        x = np.geomspace(sizes[0], sizes[-1], _LINE_POINTS)
        slope = 0.0 if fit.algbw_gbps is None else 8 / (fit.algbw_gbps * 1e3)
        figure.add_scatter(
            x=x,
            y=(fit.latency_us + slope * x) / _US_PER_MS,
            name=f"{name}, fitted",
            legendgroup=name,
            showlegend=False,
            meta=role,
            mode="lines",
            line={"width": 1.6},
            hoverinfo="skip",
        )
    everything = [point.bytes for fit in fits for point in fit.points]
    figure.update_xaxes(
        title="whole vector", type="log", **_byte_ticks(min(everything), max(everything))
    )
    times = [point.transfer_us for fit in fits for point in fit.points]
    figure.update_yaxes(title="transfer", type="log", **_time_ticks(min(times), max(times)))
    return figure


def _fit_name(fit: CostFit) -> str:
    """Formats the subject of a fit: ``all_reduce of 4, gloo``."""
    return f"{label(fit.title, 28)}, {label(fit.backend or 'backend unknown', 20)}"


def stragglers(analysis: Analysis) -> go.Figure | None:
    """Which ranks keep the others waiting: their lateness, summed, and how often (ms)."""
    rows = [row for row in analysis.stragglers if row.collectives_last]
    rows = sorted(rows, key=lambda row: row.lateness_us_total, reverse=True)[:MAX_ROWS]
    if not rows:
        return None
    # A single row would leave no space for the axis title.
    figure = base_figure(height=90 + _ROW_HEIGHT * max(len(rows), 2))
    figure.add_bar(
        x=_array([row.lateness_us_total for row in rows]) / _US_PER_MS,
        y=[f"rank {row.rank}" for row in rows],
        orientation="h",
        name="lateness",
        meta={"role": "wait"},
        text=[
            f"late in {row.late_steps} of {analysis.summary.steps} steps"
            if row.sometimes
            else f"last in {share_text(row.share)}"
            for row in rows
        ],
        textposition="auto",
        customdata=[
            [time_text(row.lateness_us), row.collectives_last, label(row.cause or "not known")]
            for row in rows
        ],
        hovertemplate="last in %{customdata[1]} collectives, median lateness %{customdata[0]}"
        "<br>cause: %{customdata[2]}<extra></extra>",
    )
    figure.update_layout(showlegend=False, bargap=0.25)
    figure.update_xaxes(title="ms after the median arrival of the others, summed")
    figure.update_yaxes(autorange="reversed")
    return figure


def critical_parts(analysis: Analysis) -> go.Figure | None:
    """Largest parts of the critical path: layers, tensors, operations (ms per step)."""
    rows = analysis.critical_path[:MAX_ROWS]
    if not rows:
        return None
    names = distinct(
        [f"{label(row.name) if row.name else row.category}, rank {row.rank}" for row in rows]
    )
    figure = base_figure(height=110 + _ROW_HEIGHT * len(rows))
    for category in CATEGORIES:
        own = [number for number, row in enumerate(rows) if row.category == category]
        if not own:
            continue
        figure.add_bar(
            x=[rows[number].us / _US_PER_MS for number in own],
            y=[names[number] for number in own],
            orientation="h",
            name=category,
            meta={"role": category},
            text=[share_text(rows[number].share) for number in own],
            textposition="auto",
            hovertemplate="%{x:.3f} ms per step, %{text} of the critical path",
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title="ms per step on the critical path")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return figure


def traffic(analysis: Analysis) -> go.Figure | None:
    """Bytes that ranks sent each other by point-to-point calls, from row to column."""
    return _bytes_between([(row.src, row.dst, row.bytes or 0) for row in analysis.p2p])


def all_to_all(analysis: Analysis) -> go.Figure | None:
    """Bytes that ranks sent each other and themselves by all-to-alls of known sizes."""
    return _bytes_between(
        [
            (src, dst, size * row.sized)
            for row in analysis.all_to_all
            for src, sizes in zip(row.ranks, row.sent or (), strict=row.sent is not None)
            for dst, size in zip(row.ranks, sizes, strict=True)
        ]
    )


def _bytes_between(rows: Sequence[tuple[int, int, float]]) -> go.Figure | None:
    """A heat map of senders, receivers and bytes; None without rows."""
    if not rows:
        return None
    ranks = sorted({rank for src, dst, _ in rows for rank in (src, dst)})
    width = -(-len(ranks) // MAX_CELLS)
    names = [_ranks_name(ranks[first : first + width]) for first in range(0, len(ranks), width)]
    place = {rank: number // width for number, rank in enumerate(ranks)}
    sent = np.zeros((len(names), len(names)), dtype=np.float32)
    np.add.at(
        sent,
        ([place[src] for src, _, _ in rows], [place[dst] for _, dst, _ in rows]),
        [size for _, _, size in rows],
    )
    sent[sent == 0] = np.nan
    figure = base_figure(height=min(560, 150 + _ROW_HEIGHT * len(names)))
    figure.add_heatmap(
        z=sent,
        x=names,
        y=names,
        hovertemplate="%{y} to %{x}: %{z:.3s}B<extra></extra>",
        meta={"role": "scale"},
        showscale=False,
        xgap=1 if len(names) <= 64 else 0,
        ygap=1 if len(names) <= 64 else 0,
    )
    if len(names) <= MAX_WRITTEN_CELLS:
        texts = [[bytes_text(cell) if cell > 0 else "" for cell in line] for line in sent.tolist()]
        figure.update_traces(text=texts, texttemplate="%{text}")
    figure.update_xaxes(title="to", showgrid=False, nticks=16)
    figure.update_yaxes(title="from", autorange="reversed", showgrid=False, nticks=16)
    return figure


def base_figure(height: int) -> go.Figure:
    """Returns an empty figure with the common layout, without colors.

    Args:
        height: In pixels.
    """
    axis = {"automargin": True, "zeroline": False}
    # All at once: each update checks the whole figure.
    return go.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 34, "b": 8},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.0,
                "yanchor": "bottom",
                "traceorder": "normal",
                "itemsizing": "constant",
            },
            "showlegend": True,
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def _array(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _bins(rows: Sequence[StepRow]) -> tuple[int, list[int]]:
    """How many neighbouring steps one bar averages, and the bars' first steps."""
    width = -(-len(rows) // MAX_BARS)
    return width, [row.step for row in rows[::width]]


def _binned(values: Sequence[float | None], width: int) -> npt.NDArray[np.float64]:
    """Means of `width` neighbours; NaN where none of them is known."""
    array = _array(values)
    padded = np.pad(array, (0, -len(array) % width), constant_values=np.nan).reshape(-1, width)
    known = ~np.isnan(padded)
    counts = known.sum(axis=1)
    sums = np.where(known, padded, 0).sum(axis=1)
    means = np.full(len(counts), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _ranks_name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _step_title(width: int) -> str:
    return "step" if width == 1 else f"step (means of {width} neighbours)"


def _tallest(rows: Sequence[StepRow], width: int) -> float:
    """Height of the tallest bar (ms); warm-up, often ten times a step, may stand out of it."""
    steady = [row for row in rows if row.steady] or rows
    return float(np.nanmax(_binned([row.wall_us for row in steady], width))) / _US_PER_MS


def _mark_warmup(figure: go.Figure, rows: Sequence[StepRow], *, times: bool = True) -> None:
    """Shades the warm-up steps, which the summary excludes; optionally shows their times."""
    first = next((row.step for row in rows if row.steady), None)
    if first is None or first == rows[0].step:
        return
    longest = max(row.wall_us for row in rows if row.step < first)
    figure.add_vrect(
        x0=rows[0].step - 0.5,
        x1=first - 0.5,
        layer="below",
        line_width=0,
        fillcolor="rgba(128,128,128,0.16)",
        annotation={
            "text": f"← warm-up, up to {time_text(longest)}" if times else "← warm-up",
            "font": {"size": 11},
            "xanchor": "left",
            "yanchor": "top",
        },
        annotation_position="top right",
    )


def _less(total: float | None, part: float | None) -> float | None:
    return None if total is None or part is None else total - part


def _copies_alone(row: RankRow) -> float | None:
    """Copies outside of compute and communication: the span minus the other parts."""
    others = (row.compute_us, row.exposed_comm_us, row.idle_us)
    known = [part for part in others if part is not None]
    if row.span_us is None or len(known) < len(others):
        return None
    return round(row.span_us - sum(known), 3)


def total_cost(row: CollectiveRow) -> float:
    """Cost of a kind of collective per rank: waiting, as mean over ranks, and transfer (us)."""
    return (row.wait_us_total or 0) / row.group_size + (row.transfer_us_total or 0)


def _collective_name(row: CollectiveRow) -> str:
    size = "" if row.bytes is None else f" {bytes_text(row.bytes)}"
    return f"{label(row.op, 20)}{size}, group {label(row.group, 16)}, {_times(row.count)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def distinct(names: Sequence[str]) -> list[str]:
    """The same names, made distinct by invisible marks: plotly merges equal categories."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name + "\N{ZERO WIDTH SPACE}" * (seen[name] - 1))
    return out


def _time_ticks(shortest: float, longest: float) -> dict[str, list[Any]]:
    """Ticks at 1, 2 and 5 times powers of ten of microseconds, values in ms, written as times."""
    powers = range(int(np.floor(np.log10(shortest))), int(np.ceil(np.log10(longest))) + 1)
    times = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    texts = [time_text(us).replace(".00 ", " ").replace(".0 ", " ") for us in times]
    return {"tickvals": [us / _US_PER_MS for us in times], "ticktext": texts}


def _byte_ticks(smallest: int, largest: int) -> dict[str, list[Any]]:
    """Ticks at powers of ten, or of two where they span too little, written as sizes."""
    base = 10 if largest >= 100 * smallest else 2
    low = int(np.floor(np.log(max(smallest, 1)) / np.log(base)))
    high = int(np.ceil(np.log(max(largest, 1)) / np.log(base)))
    values = [base**power for power in range(low, high + 1)]
    texts = [bytes_text(value).replace(".00 ", " ").replace(".0 ", " ") for value in values]
    return {"tickvals": values, "ticktext": texts}
