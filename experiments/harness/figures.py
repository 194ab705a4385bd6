"""The charts of an experiment's report; a chart is None if the results have no data for it.

As in the analyzer's figures, colours are roles of the page's palette.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.report.figures import base_figure
from ddltrace.analyzer.report.figures import label as safe_label
from ddltrace.experiments.harness.results import Results, Row, label, smoothed
from ddltrace.experiments.harness.step_intervals import Speedup
from ddltrace.experiments.harness.step_timeline import StepTimeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROW_HEIGHT: Final = 28
_SERIES: Final = 6
_SYMBOLS: Final = ("circle", "square", "diamond", "cross")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_VERDICTS: Final = (
    ("faster than tuned DDP", "overlap"),
    ("tuned DDP, or within the noise of it", "muted"),
    ("slower than tuned DDP", "exposed"),
    ("without comparison", "series-0"),
)


def step_times(results: Results) -> go.Figure | None:
    """Step time of every strategy with its interval, coloured by the verdict on it (ms)."""
    tuned = results.tuned_ddp()
    verdicts = {
        safe_label(label(row)): _verdict(row, tuned, found.speedup_tuned_ddp)
        for row, found in results.compared()
    }
    rows = {safe_label(label(row)): row for row in results.rows if row.step_time is not None}
    if not rows:
        return None
    figure = base_figure(height=110 + _ROW_HEIGHT * len(rows))
    for verdict, (text, role) in enumerate(_VERDICTS):
        own = {name: row for name, row in rows.items() if verdicts[name] == verdict}
        if not own:
            continue
        times = [row.step_time for row in own.values() if row.step_time is not None]
        figure.add_bar(
            orientation="h",
            y=list(own),
            x=[time.us / 1e3 for time in times],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [((time.high_us or time.us) - time.us) / 1e3 for time in times],
                "arrayminus": [(time.us - (time.low_us or time.us)) / 1e3 for time in times],
                "thickness": 1.2,
            },
            name=text,
            meta={"role": role},
            hovertemplate="%{x:.2f} ms",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title="ms per step", rangemode="tozero")
    _rows_downwards(figure, list(rows))
    return figure


def bytes_per_step(results: Results) -> go.Figure | None:
    """Payload and wire bytes of every strategy, per rank and step (MB)."""
    rows = {
        safe_label(label(row)): row
        for row in results.rows
        if row.payload_bytes is not None or row.wire_bytes is not None
    }
    if not rows:
        return None
    figure = base_figure(height=110 + 2 * _ROW_HEIGHT * len(rows))
    for name, role, key in (
        ("payload", "series-0", "payload_bytes"),
        ("on the wire", "series-1", "wire_bytes"),
    ):
        values = [getattr(row, key) for row in rows.values()]
        figure.add_bar(
            orientation="h",
            y=list(rows),
            x=[None if value is None else value / 1e6 for value in values],
            name=name,
            meta={"role": role},
            hovertemplate="%{x:.3f} MB",
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="MB per rank and step", rangemode="tozero")
    _rows_downwards(figure, list(rows))
    return figure


def loss_over_time(results: Results) -> go.Figure | None:
    """Smoothed training loss of every strategy's first finished run against time."""
    figure = base_figure(height=420)
    for number, row in enumerate(results.rows):
        run = next((run for run in row.runs if run.is_finished and run.losses), None)
        if run is None or len(run.losses) != len(run.elapsed_us):
            continue
        figure.add_scatter(
            x=[end / 1e6 for end in run.elapsed_us],
            y=smoothed(run.losses),
            name=safe_label(label(row)),
            mode="lines",
            meta={"role": f"series-{number % _SERIES}"},
            line={"dash": _DASHES[number // _SERIES % len(_DASHES)], "width": 1.8},
            hovertemplate="%{y:.4f} after %{x:.2f} s",
        )
    if not figure.data:
        return None
    target = results.settings.get("target_loss")
    if isinstance(target, int | float):
        figure.add_hline(y=target, line={"dash": "dot", "width": 1})
    figure.update_xaxes(title="seconds from the start of the first step", rangemode="tozero")
    figure.update_yaxes(title="training loss, mean of 5 steps")
    return figure


def staleness(results: Results) -> go.Figure | None:
    """Share of reads by their staleness in steps, for every strategy whose trace has it."""
    figure = base_figure(height=320)
    for number, row in enumerate(results.rows):
        found = (row.synchronization or {}).get("staleness")
        if not found:
            continue
        counts = {int(age): count for age, count in found["counts"].items()}
        total = sum(counts.values())
        figure.add_bar(
            x=list(counts),
            y=[count / total for count in counts.values()],
            name=safe_label(label(row)),
            meta={"role": f"series-{number % _SERIES}"},
            hovertemplate="%{y:.1%} are %{x} steps behind",
        )
    if not figure.data:
        return None
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="staleness in steps")
    figure.update_yaxes(title="share of reads", rangemode="tozero", tickformat=".0%")
    return figure


def tokens_by_expert(results: Results) -> go.Figure | None:
    """Tokens of each rank for each expert, of every strategy that divides experts over ranks."""
    found = {
        safe_label(label(r)): r.choices["experts"] for r in results.rows if "experts" in r.choices
    }
    if not found:
        return None
    cells: dict[str, dict[str, tuple[int, int]]] = {}
    for name, experts in found.items():
        for block, by_rank in enumerate(experts["tokens"]):
            for rank, tokens in enumerate(by_rank):
                row = cells.setdefault(f"{name} · rank {rank}", {})
                for expert, count in enumerate(tokens):
                    dropped = experts["dropped"][block][rank][expert]
                    row[f"block {block} · expert {expert}"] = (count, dropped)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    known = [[row.get(column, (None, None)) for column in columns] for row in cells.values()]
    figure = base_figure(height=150 + _ROW_HEIGHT * len(cells))
    figure.add_heatmap(
        z=[[count for count, _ in row] for row in known],
        x=columns,
        y=list(cells),
        text=[[_cell(*cell) for cell in row] for row in known],
        texttemplate="%{text}",
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        meta={"role": "scale"},
        showscale=False,
        xgap=1,
        ygap=1,
    )
    figure.update_xaxes(type="category", showgrid=False)
    _rows_downwards(figure, list(cells))
    return figure


def _cell(count: int | None, dropped: int | None) -> str:
    if count is None:
        return ""
    return f"{count} ({dropped} dropped)" if dropped else str(count)


def costs_and_loss(results: Results) -> go.Figure | None:
    """Step time against wire bytes, and beside it on the same axis against the final loss.

    One point per strategy with a step time (ms). A strategy without wire bytes or without a finite
    loss, such as one that diverged, is missing in that half only.
    """
    rows = [row for row in results.rows if row.step_time is not None]
    halves = (
        ("x", "wire_bytes", 1e6, "%{x:.3f} MB on the wire"),
        ("x2", "train_loss", 1.0, "loss %{x:.4f}"),
    )
    figure = base_figure(height=420)
    for number, row in enumerate(rows):
        assert row.step_time is not None
        for axis, key, unit, text in halves:
            value = getattr(row, key)
            if value is None or not math.isfinite(value):
                continue
            figure.add_scatter(
                x=[value / unit],
                y=[row.step_time.us / 1e3],
                xaxis=axis,
                yaxis="y",
                mode="markers",
                name=safe_label(label(row)),
                legendgroup=str(number),
                showlegend=axis == "x" or row.wire_bytes is None,
                meta={"role": f"series-{number % _SERIES}"},
                marker={"size": 11, "symbol": _SYMBOLS[number // _SERIES % len(_SYMBOLS)]},
                hovertemplate=f"%{{y:.2f}} ms per step, {text}",
            )
    if not figure.data:
        return None
    figure.update_layout(
        xaxis={"domain": [0, 0.48], "title": "MB on the wire per rank and step"},
        xaxis2={"domain": [0.52, 1], "title": "training loss at the end", "anchor": "y"},
    )
    figure.update_yaxes(title="ms per step", rangemode="tozero")
    return figure


def step_timelines(steps: Mapping[str, StepTimeline]) -> go.Figure | None:
    """One step of every strategy under each other on one axis (ms from the step's start).

    Args:
        steps: By the strategy's label, in the order of the rows.
    """
    if not steps:
        return None
    bars: dict[str, dict[str, list[Any]]] = {}
    lanes: list[str] = []
    for name, step in steps.items():
        for lane in ("compute", "codec", "network"):
            if any(bar.lane == lane for bar in step.bars):
                lanes.append(f"{safe_label(name)} · {lane}")
        for bar in step.bars:
            columns = bars.setdefault(bar.role, {"x": [], "base": [], "y": [], "customdata": []})
            columns["x"].append(bar.ms)
            columns["base"].append(bar.start_ms)
            columns["y"].append(f"{safe_label(name)} · {bar.lane}")
            columns["customdata"].append([safe_label(bar.name), bar.ms])
    figure = base_figure(height=110 + _ROW_HEIGHT * len(lanes))
    for role, columns in bars.items():
        figure.add_bar(
            orientation="h",
            name={"collective": "message", "update": "optimizer"}.get(role, role),
            meta={"role": role},
            # Waiting lies inside a phase: narrower bars keep both visible.
            width=0.4 if role == "wait" else 0.8,
            hovertemplate="%{customdata[0]}: %{customdata[1]:.3f} ms from %{base:.3f} ms",
            **columns,
        )
    figure.update_layout(barmode="overlay")
    longest = max(step.wall_ms for step in steps.values())
    figure.update_xaxes(title="ms from the start of the step", range=[0, longest])
    _rows_downwards(figure, lanes)
    return figure


def _verdict(row: Row, tuned: Row | None, found: Speedup | None) -> int:
    """The index of a row's verdict in `_VERDICTS`."""
    if tuned is not None and row is tuned:
        return 1
    return 3 if found is None else {"faster": 0, "noise": 1, "slower": 2}[found.verdict]


def _rows_downwards(figure: go.Figure, names: list[str]) -> None:
    figure.update_yaxes(
        categoryorder="array", categoryarray=names, autorange="reversed", showgrid=False
    )
