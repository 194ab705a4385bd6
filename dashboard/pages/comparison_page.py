"""The compare page: two traces side by side, on a common time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dash import dcc, html

from ddltrace.analyzer.compare.comparison import (
    RANK_STEP,
    compare_shares,
    compare_steps,
    compare_work,
    what_decides,
)
from ddltrace.analyzer.compare.mean_difference import LEVEL, MIN_STEPS
from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    change_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.dashboard import charts
from ddltrace.dashboard.pages.comparison_matrix import differences_card, matrix_cards
from ddltrace.dashboard.timeline.component import Timeline
from ddltrace.dashboard.widgets import card, empty, graph, notes_box, step_field, table

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.compare.comparison import Difference
    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

Pair = tuple["OpenTrace", "OpenTrace"]
Span = tuple[int, int] | None

_MANY: Final = 1000
_MARGIN: Final = 0.05
_SAME_SHARE: Final = 0.0005
"""A smaller difference of shares would be written as 0.0 points."""


def steady_times(analysis: Analysis) -> list[float]:
    """Wall times of the steady steps, microseconds."""
    return [row.wall_us for row in analysis.steps if row.steady]


def _lettered(pair: Pair) -> list[tuple[str, OpenTrace]]:
    """The traces with distinct titles, even if a trace is compared with itself."""
    return [
        (f"{letter}: {opened.title}", opened) for letter, opened in zip("AB", pair, strict=True)
    ]


FIGURES: Final[dict[str, Callable[[Pair], go.Figure | None]]] = {
    "compare-steps": lambda pair: charts.step_distributions(
        [(title, steady_times(opened.analysis)) for title, opened in _lettered(pair)]
    ),
    "compare-breakdown": lambda pair: charts.breakdown_of_runs(
        [(title, opened.breakdowns) for title, opened in _lettered(pair)]
    ),
    "compare-ranks-0": lambda pair: charts.breakdown(pair[0].breakdowns, beside=pair[1].breakdowns),
    "compare-ranks-1": lambda pair: charts.breakdown(pair[1].breakdowns, beside=pair[0].breakdowns),
}
"""Name of a figure -> the function that makes it; None if the traces have no data for it."""


def compare_page(workspace: Workspace, address: Address) -> Component:
    """The page for two traces.

    Args:
        workspace: All traces.
        address: ``a`` and ``b`` are the numbers of the baseline trace and of the trace to compare
            with it; the timelines are aligned at the start of step ``step``, in B of step
            ``step_b`` if it is given.

    Raises:
        TraceError: One of them cannot be analyzed.
    """
    if len(workspace.traces) < 2:
        return html.Main(
            empty(
                "Comparing takes two traces",
                html.Span(["Start with: ", html.Code("ddltrace dashboard TRACE TRACE")]),
            ),
            className="page",
        )
    pair = pair_of(workspace, address)
    steps = aligned_steps(address)
    spans = [span_of_step(opened, step) for opened, step in zip(pair, steps, strict=True)]
    step = compare_steps([pair[0].analysis], [pair[1].analysis])
    made = {name: make(pair) for name, make in FIGURES.items()}
    cards = [
        card(title, graph(name, figure.layout.height), hint=hint, wide=wide)
        for name, title, hint, wide in (
            ("compare-steps", "Step times", "Every dot is a steady step.", True),
            (
                "compare-breakdown",
                "Where a step goes",
                "Means over ranks and steady steps.",
                True,
            ),
            ("compare-ranks-0", f"A by rank: {pair[0].title}", "", False),
            ("compare-ranks-1", f"B by rank: {pair[1].title}", "", False),
        )
        if (figure := made[name]) is not None
    ]
    return html.Main(
        [
            _chooser(workspace, pair),
            _verdict(pair, step),
            card("In numbers", _summary(pair, step), hint=_HINT, wide=True),
            html.Div(cards, className="cards"),
            differences_card(*pair),
            *matrix_cards(workspace),
            html.Section(
                [
                    html.H2("Both timelines, one axis"),
                    *_alignment(address, steps, spans),
                    _timelines(pair, spans),
                ],
                className="card wide",
            ),
        ],
        className="page",
    )


def pair_of(workspace: Workspace, address: Address) -> Pair:
    """The traces that the page compares."""
    return workspace.get(address.number("a", 0)), workspace.get(address.number("b", 1))


def aligned_steps(address: Address) -> tuple[int | None, int | None]:
    """The step of each trace at whose start its timeline has its 0; None for the first event."""
    if not address.text("step"):
        return None, None
    step = address.number("step", 0)
    return step, address.number("step_b", step)


def span_of_step(opened: OpenTrace, step: int | None) -> tuple[int, int] | None:
    """Earliest start and latest end of a step, ns since the trace's first event; None if not
    known."""
    if step is None:
        return None
    spans = [opened.timeline.step_span(rank, step) for rank in opened.trace.ranks]
    known = [span for span in spans if span is not None]
    return (min(s for s, _ in known), max(e for _, e in known)) if known else None


def _timelines(pair: Pair, spans: Sequence[Span]) -> Component:
    """Both timelines, and the panel with the difference of what they show."""
    shown = max((span[1] - span[0] for span in spans if span is not None), default=None)
    both = []
    for letter, opened, span in zip("AB", pair, spans, strict=True):
        zero = 0 if span is None else span[0]
        # At first, the aligned steps are shown.
        margin = 0 if shown is None else round(_MARGIN * shown)
        window = {} if shown is None else {"window": [zero - margin, zero + shown + margin]}
        timeline = Timeline(
            id=f"timeline-{letter.lower()}",
            trace=opened.number,
            link=letter.lower(),
            sync="compare",
            shift=zero,
            sync_follower=letter == "B",
            compact=True,
            **window,
        )
        title = html.H3([html.B(letter), opened.title])
        both.append(html.Div([title, timeline], className="beside"))
    return html.Div(
        [
            html.Div(both),
            html.Aside(
                id="range-difference",
                className="details",
                tabIndex="0",  # scrolled with the arrow keys
                **{"aria-live": "polite", "aria-label": "Difference in the range that is shown"},
            ),
        ],
        className="both",
    )


def _alignment(
    address: Address, steps: tuple[int | None, int | None], spans: Sequence[Span]
) -> list[Component]:
    """The fields that align the timelines at steps, and what is at 0 of their axis."""
    first, second = steps
    fields = step_field("compare-step", "Align at step", first, placeholder="first event")
    if first is None:
        text = "Time runs from each trace's first event."
    else:
        of = f"step {first}" if first == second else f"step {first} of A and step {second} of B"
        text = f"Time runs from the start of {of}."
        lacking = [letter for letter, span in zip("AB", spans, strict=True) if span is None]
        if lacking:
            text += f" {' and '.join(lacking)} has no such step: time runs from its first event."
        own = second if address.text("step_b") else None
        fields += step_field("compare-step-b", "of B at step", own, placeholder=f"{first}")
        fields.append(
            dcc.Link(
                "Align at the first event", href=address.link("/compare", step=None, step_b=None)
            )
        )
    return [
        html.P(
            f"{text} What both show is compared, or the range that you measure with Shift + drag.",
            className="hint",
        ),
        html.Div(fields, className="step-choice"),
    ]


def _chooser(workspace: Workspace, pair: Pair) -> Component:
    options = [{"label": opened.title, "value": opened.number} for opened in workspace.traces]
    children: list[Any] = []
    for letter, opened in zip("AB", pair, strict=True):
        children += [
            html.Label([html.B(letter), "basis" if letter == "A" else "compared"]),
            dcc.Dropdown(
                options,
                opened.number,
                id=f"compare-{letter.lower()}",
                clearable=False,
                searchable=False,
                className="chooser",
            ),
        ]
    return html.Div(children, className="compare-bar")


def _verdict(pair: Pair, step: Difference) -> Component:
    """States which trace is faster, and whether the difference is significant."""
    notes = [notes_box(side.notes, of=title) for title, side in _lettered(pair) if side.notes]
    work, _, _ = compare_work(pair[0].analysis, pair[1].analysis)
    if work.same is False:
        # Before the notes, because it makes all differences below meaningless.
        notes.insert(0, html.P(printable(work.sentence), className="lead", id="other-work"))
    if step.change is None or step.low is None or step.high is None or not step.before:
        text = f"Too few steady steps to compare step times: each trace needs {MIN_STEPS}."
        return html.Section([html.H1(text), *notes], className="headline")
    undecided = what_decides(step, [pair[0].analysis], [pair[1].analysis])
    if undecided is not None:
        text = "It is not known whether B's step is shorter or longer than A's."
    else:
        word = "shorter" if step.verdict == "less" else "longer"
        share = share_text(abs(step.change) / step.before)
        own = " on one rank" if step.name == RANK_STEP else ""
        text = f"B's mean step{own} is {time_text(abs(step.change))} ({share}) {word}."
    return html.Section(
        [
            html.H1(text),
            html.P(
                f"{LEVEL:.0%} interval of the difference of the means: "
                f"{change_text(step.low)} to {change_text(step.high)}, over "
                f"{len(steady_times(pair[0].analysis))} and "
                f"{len(steady_times(pair[1].analysis))} steady steps.",
                className="lead",
            ),
            html.P(f"One run a side: {undecided}.", className="lead") if undecided else None,
            *notes,
        ],
        className="headline",
    )


def _summary(pair: Pair, step: Difference) -> Component:
    shares = compare_shares([pair[0].analysis], [pair[1].analysis])
    verdicts = {row.name: row.verdict for row in (step, *shares)}
    rows = []
    for name, read, show, less_is_better, judged in _MEASURES:
        first, second = (read(opened) for opened in pair)
        verdict = verdicts.get(judged, "")
        better = None if verdict not in ("less", "more") else less_is_better
        change = _change(first, second, show, better)
        rows.append((name, show(first), show(second), *change, _VERDICTS.get(verdict, "")))
    return table(("", "A", "B", "difference", "of A", ""), rows)


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _number_text(value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return f"{value:,.0f}" if value == round(value) or abs(value) >= _MANY else f"{value:.4g}"


_Show = Callable[[float | None], str]
_Read = Callable[["OpenTrace"], "float | None"]

_VERDICTS: Final = {"unknown": "not decided"}
_HINT: Final = (
    "Coloured where B is better or worse than A by more than runs of the same job differ; “not "
    "decided” where it is not."
)

_MEASURES: Final[tuple[tuple[str, _Read, _Show, bool | None, str], ...]] = (
    ("Step, mean", lambda a: a.analysis.summary.step_us.mean, time_text, True, "step"),
    (
        "Step on one rank, mean",
        lambda a: a.analysis.summary.rank_step_us.mean,
        time_text,
        True,
        RANK_STEP,
    ),
    ("Step, median", lambda a: a.analysis.summary.step_us.p50, time_text, True, ""),
    ("Step, 95th percentile", lambda a: a.analysis.summary.step_us.p95, time_text, True, ""),
    (
        "Overlap ratio",
        lambda a: a.analysis.summary.overlap_ratio,
        share_text,
        False,
        "overlap_ratio",
    ),
    (
        "Compute on a rank",
        lambda a: a.analysis.summary.compute_share,
        share_text,
        None,
        "compute_share",
    ),
    (
        "Exposed communication on a rank",
        lambda a: a.analysis.summary.exposed_comm_share,
        share_text,
        True,
        "exposed_comm_share",
    ),
    (
        "Waiting for others on a rank",
        lambda a: a.analysis.summary.sync_overhead_share,
        share_text,
        True,
        "",
    ),
    ("Idle on a rank", lambda a: a.analysis.summary.idle_share, share_text, True, "idle_share"),
    ("Update on a rank", lambda a: a.analysis.summary.update_overhead_share, share_text, None, ""),
    ("Data loading on a rank", lambda a: a.analysis.summary.data_share, share_text, True, ""),
    (
        "Message bytes per rank and step",
        lambda a: _mean([row.message_bytes for row in a.breakdowns]),
        bytes_text,
        None,
        "",
    ),
    (
        "Messages per rank and step",
        lambda a: _mean([row.messages for row in a.breakdowns]),
        _number_text,
        None,
        "",
    ),
    ("Ranks", lambda a: len(a.trace.ranks), _number_text, None, ""),
    ("Steps", lambda a: a.analysis.trace.steps, _number_text, None, ""),
)
"""Name, value, format, whether less is better (None: neither), and the name of the comparison's
verdict, if it has one."""


def _change(
    first: float | None, second: float | None, show: _Show, less_is_better: bool | None
) -> tuple[Any, Any]:
    if first is None or second is None:
        return NOT_KNOWN, NOT_KNOWN
    change = second - first
    if change == 0 or (show is share_text and abs(change) < _SAME_SHARE):
        return "same", ""
    sign = "+" if change > 0 else "\N{MINUS SIGN}"
    if show is share_text:
        texts = (f"{sign}{abs(100 * change):.1f} points", "")
    else:
        texts = (
            f"{sign}{show(abs(change))}",
            f"{sign}{share_text(abs(change) / first)}" if first else "",
        )
    style = "" if less_is_better is None else "gain" if (change < 0) == less_is_better else "loss"
    return html.Span(texts[0], className=style), html.Span(texts[1], className=style)
