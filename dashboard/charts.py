"""Figures that only the dashboard shows: breakdown, tensors, and comparisons of two traces.

Like the report's figures they carry roles instead of colors; `ddltrace.dashboard.theme.dress`
colors them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from ddltrace.analyzer.formatting.units import bytes_text, time_text
from ddltrace.analyzer.model import Analysis, Analyzed
from ddltrace.analyzer.report.figures import base_figure, distinct, label
from ddltrace.dashboard.rank_breakdowns import PARTS, Breakdown

TITLES: Final = {
    "compute": "compute alone",
    "update": "update alone",
    "overlap": "compute and communication",
    "exposed": "exposed communication",
    "copies": "copies",
    "data": "idle for data",
    "idle": "idle otherwise",
}
_ROLE_OF_PART: Final = {"copies": "copy"}
_ROW_HEIGHT: Final = 34
_UPRIGHT_RANKS: Final = 24
_MAX_TENSORS: Final = 12
_MAX_STEPS: Final = 400
_SERIES: Final = 6
"""Number of colors of series."""
_US_PER_MS: Final = 1e3


def breakdown(
    breakdowns: Sequence[Breakdown], *, beside: Sequence[Breakdown] = ()
) -> go.Figure | None:
    """Mean time per step of each rank, split into parts that sum to the step (ms).

    Args:
        breakdowns: One per rank.
        beside: The breakdowns of another figure that must have the same scale.
    """
    if not breakdowns:
        return None
    upright = len(breakdowns) > _UPRIGHT_RANKS
    names = [row.rank if upright else f"rank {row.rank}" for row in breakdowns]
    figure = _stacked(names, [row.parts_us for row in breakdowns], upright=upright)
    if beside:
        longest = max(sum(row.parts_us.values()) for row in (*breakdowns, *beside)) / _US_PER_MS
        update = figure.update_yaxes if upright else figure.update_xaxes
        update(range=[0, 1.03 * longest])
    return figure


HEAT: Final = {
    "time": ("wall_ns", "step time"),
    "compute": ("compute_ns", "compute"),
    "wait": ("waiting_ns", "waiting for others"),
    "late": (None, "lateness"),
    "exposed": ("exposed_ns", "exposed communication"),
}
"""What the map of ranks and steps can show: a column of `Analysis.rank_steps`, and its title."""


def ranks_by_step(analyzed: Analyzed, shown: str) -> go.Figure | None:
    """A map of all ranks and steps, colored by one of their times (ms).

    More than 400 steps are grouped: a cell is the mean of its steps, and names the first.

    Args:
        analyzed: The measured trace.
        shown: A key of `HEAT`.

    Returns:
        None with fewer than two ranks or steps, or if the times are not known.
    """
    column, title = HEAT[shown]
    of = analyzed.analysis.rank_steps
    values = _lateness(analyzed) if column is None else of[column]
    if not len(of["rank"]) or not np.isfinite(values).any():
        return None
    ranks, row = np.unique(of["rank"], return_inverse=True)
    steps, place = np.unique(of["step"], return_inverse=True)
    if len(ranks) < 2 or len(steps) < 2:
        return None
    group = -(-len(steps) // _MAX_STEPS)
    shape = (len(ranks), -(-len(steps) // group))
    known = np.isfinite(values)
    cell = np.ravel_multi_index((row, place // group), shape)[known]
    count = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, weights=values[known], minlength=len(count))
    mean = np.where(count > 0, total / np.maximum(count, 1) / 1e6, np.nan).reshape(shape)
    figure = base_figure(height=120 + min(max(8 * len(ranks), 120), 520))
    figure.add_heatmap(
        z=mean,
        x=steps[::group],
        y=ranks,
        meta={"role": "scale"},
        colorbar={"title": "ms", "thickness": 12},
        hovertemplate=f"rank %{{y}}, step %{{x}}: {title} %{{z:.3f}} ms<extra></extra>",
    )
    figure.update_xaxes(title="step" if group == 1 else f"step, {group} in a cell")
    figure.update_yaxes(title="rank", autorange="reversed", tickformat="d")
    return figure


def _lateness(analyzed: Analyzed) -> npt.NDArray[np.float64]:
    """By how much each rank came last to collectives of each step, summed (ns).

    Returns:
        In the order of `Analysis.rank_steps`; a lateness is the arrival of the last rank minus the
        median arrival of the others.
    """
    of, one = analyzed.analysis.rank_steps, analyzed.joined.collectives
    chosen = one.timed & (one.step >= 0)
    steps = int(max(of["step"].max(initial=0), one.step[chosen].max(initial=0))) + 1
    late = np.bincount(
        one.last_rank[chosen] * steps + one.step[chosen],
        weights=(one.last - one.others)[chosen],
        minlength=(int(of["rank"].max(initial=0)) + 1) * steps,
    )
    found: npt.NDArray[np.float64] = late[of["rank"] * steps + of["step"]]
    return found


def breakdown_of_runs(runs: Sequence[tuple[str, Sequence[Breakdown]]]) -> go.Figure | None:
    """Mean time per step of whole runs, over their ranks, one bar per run (ms)."""
    known = [(title, rows) for title, rows in runs if rows]
    if not known:
        return None
    means = [
        {part: float(np.mean([row.parts_us[part] for row in rows])) for part in PARTS}
        for _, rows in known
    ]
    return _stacked(distinct([label(title) for title, _ in known]), means, upright=False)


def _stacked(
    names: Sequence[str | int], rows: Sequence[dict[str, float]], *, upright: bool
) -> go.Figure:
    figure = base_figure(height=320 if upright else 104 + _ROW_HEIGHT * len(rows))
    for part in PARTS:
        values = [row[part] / _US_PER_MS for row in rows]
        if not any(values):
            continue
        totals = [sum(row.values()) for row in rows]
        shares = [
            row[part] / total if total else 0.0 for row, total in zip(rows, totals, strict=True)
        ]
        figure.add_bar(
            x=names if upright else values,
            y=values if upright else names,
            orientation="v" if upright else "h",
            name=TITLES[part],
            meta={"role": _ROLE_OF_PART.get(part, part)},
            customdata=shares,
            hovertemplate=("%{y:.2f} ms" if upright else "%{x:.2f} ms") + " (%{customdata:.1%})",
        )
    figure.update_layout(
        barmode="stack", bargap=0 if upright else 0.3, hovermode="x unified" if upright else "y"
    )
    if upright:
        figure.update_xaxes(title="rank")
        figure.update_yaxes(title="ms per step")
    else:
        figure.update_xaxes(title="ms per step, mean of the steady steps")
        figure.update_yaxes(autorange="reversed")
    return figure


def exposed_tensors(analysis: Analysis) -> go.Figure | None:
    """The tensors with the most exposed communication, with their sizes (ms per step)."""
    rows = [row for row in analysis.tensors if row.exposed_us]
    rows = sorted(rows, key=lambda row: row.exposed_us or 0, reverse=True)[:_MAX_TENSORS]
    if not rows:
        return None
    figure = base_figure(height=76 + 26 * len(rows))
    figure.add_bar(
        x=[(row.exposed_us or 0) / _US_PER_MS for row in rows],
        y=distinct([label(row.name) for row in rows]),
        orientation="h",
        meta={"role": "exposed"},
        text=[bytes_text(row.bytes) for row in rows],
        textposition="outside",  # a label inside is hidden where it does not fit
        cliponaxis=False,
        customdata=[
            [time_text(row.ready_us), time_text(row.complete_us), row.bucket or "?"] for row in rows
        ],
        hovertemplate="%{x:.3f} ms exposed per step<br>ready %{customdata[0]}, complete "
        "%{customdata[1]} after the step began<br>%{customdata[2]} tensors in its message"
        "<extra></extra>",
    )
    figure.update_layout(showlegend=False, bargap=0.25, margin={"t": 8})
    longest = (rows[0].exposed_us or 0) / _US_PER_MS
    figure.update_xaxes(title="ms exposed per step", range=[0, 1.16 * longest])
    figure.update_yaxes(autorange="reversed")
    return figure


def step_distributions(runs: Sequence[tuple[str, Sequence[float]]]) -> go.Figure | None:
    """Wall times of the steady steps of some runs (ms), as a box plot with all points."""
    if not any(values for _, values in runs):
        return None
    figure = base_figure(height=104 + 76 * len(runs))
    names = distinct([label(title) for title, _ in runs])
    for number, (name, (_, values)) in enumerate(zip(names, runs, strict=True)):
        figure.add_box(
            x=[value / _US_PER_MS for value in values],
            y=[name] * len(values),
            name=name,
            orientation="h",
            meta={"role": f"series-{number % _SERIES}"},
            boxpoints="all" if len(values) <= 500 else "outliers",
            jitter=0.6,
            pointpos=0,
            marker={"size": 5, "opacity": 0.55},
            hovertemplate="%{x:.3f} ms<extra></extra>",
        )
    figure.update_layout(showlegend=False, boxgap=0.35, margin={"t": 8})
    figure.update_xaxes(title="ms per step, steady steps")
    figure.update_yaxes(autorange="reversed")
    return figure
