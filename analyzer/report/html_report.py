"""The report as one HTML file that needs no network: ``ddltrace analyze TRACE --html FILE``.

The template escapes every name; names in figures are escaped when the figures are created. The file
contains plotly.js in compressed form, and the browser decompresses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.formatting.units import printable, printable_words, share_text, time_text
from ddltrace.analyzer.measures.goodput import Goodput
from ddltrace.analyzer.measures.summary import Summary
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.html_page import page_environment, page_parts, write_page
from ddltrace.analyzer.report.nccl_text import nccl_verdicts
from ddltrace.analyzer.report.notes import notes_of, state_text
from ddltrace.analyzer.report.sentences import (
    dimensions_text,
    extra_text,
    goodput_text,
    hang_text,
    idle_text,
    predicted_text,
    sentences,
    throughput_of,
)
from ddltrace.analyzer.trace.suggested_commands import dashboard_command
from ddltrace.tracer.trace.completeness import listed

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddltrace.analyzer.joined.critical_path import Path as CriticalPath
    from ddltrace.analyzer.model import Analyzed
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.storage.location import Location

_ASSETS: Final = "ddltrace.analyzer.report"

TENSORS_SHOWN: Final = 25
"""Rows of the table of exposed tensors."""

_GOODPUT: Final = {
    "start": "host",
    "training": "compute",
    "checkpoint": "copy",
    "evaluation": "overlap",
    "restart": "exposed",
    "hang": "unfinished",
    "unrecorded": "muted",
    "other": "idle",
}
"""Parts of the job's time -> roles of their colors."""

_CAUSES_SHOWN: Final = 12
_OF_A_STEP: Final = "of a step, mean over ranks and steps"
_PIPELINES_SHOWN: Final = 8
MAX_PIECES: Final = 20_000
"""Pieces of critical paths that the file holds, over all steps that can be chosen."""

MAX_PIECES_OF_STEP: Final = 4_000
"""Pieces of one path: beyond, the shortest are left out, which no screen could show."""


@dataclass(frozen=True)
class Tile:
    """One number at the top of the report."""

    name: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Share:
    """One part of the bar that sums to the step."""

    name: str
    role: str
    share: float


@dataclass(frozen=True)
class ShownPath:
    """One step whose critical path can be shown.

    Attributes:
        step: Its number.
        wall_us: Its wall time.
        why: What it is among the steps: ``the median``, ``the slowest``; empty for others.
        pieces: Columns as report.js takes them.
    """

    step: int
    wall_us: float
    why: str
    pieces: dict[str, list[Any]]


def write_html(
    analyzed: Analyzed, trace: Trace, path: Path, sources: Sequence[Location] | None = None
) -> None:
    """Writes the report as one self-contained HTML file.

    Args:
        analyzed: The analysis to report.
        trace: Where it comes from.
        path: The file; replaced whole if it exists.
        sources: Paths from which the trace was opened, if not its own path.

    Raises:
        DdltraceError: The file cannot be written.
    """
    write_page(render(analyzed, trace, sources), path)


def render(analyzed: Analyzed, trace: Trace, sources: Sequence[Location] | None = None) -> str:
    """The report's text; arguments as those of `write_html`."""
    environment = page_environment(_ASSETS)
    environment.filters.update(
        command=printable_words,
        ranks=listed,
        sentence=_sentence,
        extra=extra_text,
        hang_text=hang_text,
        predicted=predicted_text,
    )
    analysis = analyzed.analysis
    drawn = {name: figure for name, figure in _figures(analysis) if figure is not None}
    names: dict[str, int] = {}
    paths = _paths(analyzed, names)
    data = {
        "figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()},
        "paths": {path.step: path.pieces for path in paths},
        "names": list(names),
        "categories": CATEGORIES,
    }
    exposed = sorted(analysis.tensors, key=lambda row: row.exposed_us or 0, reverse=True)
    return environment.get_template(
        "report.html.jinja"
    ).render(
        **page_parts(data),
        figures=drawn,
        analysis=analysis,
        trace=analysis.trace,
        state=state_text(analysis.trace),
        notes=notes_of(analysis),
        clock=analysis.clock,
        summary=analysis.summary,
        joining=analysis.joining,
        hangs=analysis.hangs,
        slow=analysis.slow_steps,
        idle=idle_text(analysis.summary),
        dimensions=analysis.compared_dimensions(),
        dimensions_text=dimensions_text(analysis.summary),
        fits=analysis.cost_fits,
        findings=analysis.findings,
        pipelines=analysis.pipelines[:_PIPELINES_SHOWN],
        waiting=analysis.waiting,
        root_causes=[row for row in analysis.root_causes[:_CAUSES_SHOWN] if row.share >= 0.01],
        ranks=analysis.ranks,
        nccl_verdicts=nccl_verdicts(analysis.nccl),
        sentences=sentences(analysis)[-3:],  # a hang, if there is one, has a box of its own
        tiles=_tiles(analysis.summary),
        shares=_shares(analysis.summary),
        goodput=analysis.goodput,
        goodput_text=goodput_text,
        goodput_parts=_goodput_parts(analysis.goodput),
        paths=paths,
        collectives=sorted(analysis.collectives, key=figures.total_cost, reverse=True),
        unsure=any(row.unsure for row in analysis.collectives),
        tensors=exposed[:TENSORS_SHOWN],
        tensors_left=len(exposed[TENSORS_SHOWN:]),
        most_exposed=max((row.exposed_us or 0 for row in exposed), default=0) or 1,
        missing_ranks=sorted(set(range(analysis.trace.world_size)) - set(analysis.trace.ranks)),
        created=_date(trace.run.created_unix_ns),
        sources=" ".join(map(str, sources or [trace.path])),
        next=dashboard_command(sources or [trace.path]),
        version=metadata.version("ddltrace"),
    )


def _figures(analysis: Analysis) -> Iterable[tuple[str, go.Figure | None]]:
    for make in (
        figures.step_times,
        figures.critical_parts,
        figures.rank_breakdown,
        figures.idle_causes,
        figures.stragglers,
        figures.overlap_over_steps,
        figures.wait_against_transfer,
        figures.bandwidth_against_size,
        figures.cost_fits,
        figures.traffic,
        figures.all_to_all,
    ):
        yield make.__name__, make(analysis)


def _paths(analyzed: Analyzed, names: dict[str, int]) -> list[ShownPath]:
    """Returns the steps whose path can be selected: notable steps first, then all that fit.

    Args:
        analyzed: Where they come from.
        names: Takes up every name that a piece has, with its number.
    """
    rows = [row for row in analyzed.analysis.steps if row.step in analyzed.paths]
    by_time = sorted((row for row in rows if row.steady), key=lambda row: row.wall_us) or rows
    why: dict[int, str] = {}
    if by_time:
        for row, text in (
            (by_time[len(by_time) // 2], "the median"),
            (by_time[-1], "the slowest"),
            (by_time[0], "the fastest"),
        ):
            why.setdefault(row.step, text)
    shown: list[ShownPath] = []
    left = MAX_PIECES
    for row in sorted(rows, key=lambda row: list(why).index(row.step) if row.step in why else 9):
        pieces = _pieces(analyzed.paths[row.step], names)
        left -= len(pieces["rank"])
        if left < 0 and shown:
            break
        shown.append(ShownPath(row.step, row.wall_us, why.get(row.step, ""), pieces))
    return shown


def _pieces(path: CriticalPath, names: dict[str, int]) -> dict[str, list[Any]]:
    """A path's pieces as columns, times in ms from its start."""
    length = path.end - path.start
    kept = np.arange(len(path))
    if len(kept) > MAX_PIECES_OF_STEP:
        kept = np.sort(np.argsort(length)[-MAX_PIECES_OF_STEP:])
    texts = [
        figures.label(path.names[name]) if name >= 0 else CATEGORIES[category]
        for name, category in zip(
            path.name[kept].tolist(), path.category[kept].tolist(), strict=True
        )
    ]
    return {
        "start_ms": ((path.start[kept] - path.start[0]) / 1e6).tolist(),
        "ms": (length[kept] / 1e6).tolist(),
        "rank": path.rank[kept].tolist(),
        "category": path.category[kept].tolist(),
        "name": [names.setdefault(text, len(names)) for text in texts],
    }


def _tiles(summary: Summary) -> list[Tile]:
    times = summary.step_us
    return [
        Tile(
            "step, mean",
            time_text(times.mean),
            f"first start to last end; median {time_text(times.p50)}, p95 {time_text(times.p95)}",
        ),
        Tile("overlap ratio", share_text(summary.overlap_ratio), "of communication is hidden"),
        Tile("step on a rank", time_text(summary.rank_step_us.mean), "mean"),
        Tile("compute on a rank", share_text(summary.compute_share), _OF_A_STEP),
        Tile("exposed communication on a rank", share_text(summary.exposed_comm_share), _OF_A_STEP),
        Tile("idle on a rank", share_text(summary.idle_share), _OF_A_STEP),
        Tile("waiting for others on a rank", share_text(summary.sync_overhead_share), _OF_A_STEP),
        Tile("update on a rank", share_text(summary.update_overhead_share), _OF_A_STEP),
        Tile("data loading on a rank", share_text(summary.data_share), _OF_A_STEP),
        *(Tile(what, value, remark) for what, value, remark in throughput_of(summary)),
    ]


def _goodput_parts(goodput: Goodput | None) -> list[Share]:
    if goodput is None:
        return []
    shares = vars(goodput.shares)
    return [Share(name, role, shares[name]) for name, role in _GOODPUT.items() if shares[name]]


def _shares(summary: Summary) -> list[Share]:
    """The parts of a step; empty where one of them is unknown, as they would not sum to it."""
    parts = [
        ("compute on a rank", "compute", summary.compute_share),
        ("exposed communication on a rank", "exposed", summary.exposed_comm_share),
        ("copies on a rank", "copy", summary.copy_share),
        ("idle on a rank", "idle", summary.idle_share),
    ]
    if any(share is None for _, _, share in parts):
        return []
    return [Share(name, role, share) for name, role, share in parts if share]


def _sentence(clause: str) -> str:
    """A finding's clause as a sentence of its own."""
    text = printable(clause)
    return f"{text[:1].upper()}{text[1:]}."


def _date(unix_ns: int | None) -> str:
    if unix_ns is None:
        return ""
    try:
        moment = datetime.fromtimestamp(unix_ns / 1e9, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M} UTC"
