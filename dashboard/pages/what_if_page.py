"""The page of what-if questions: another network, strategy or number of ranks, and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from dash import ALL, Input, Output, State, ctx, dcc, html, no_update

from ddltrace.analyzer.formatting.units import printable, share_text, time_text
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.theme import GRAPH_CONFIG, dress, parse_theme
from ddltrace.dashboard.widgets import card, empty, save_buttons, table
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.extensions import require_extension

if TYPE_CHECKING:
    import dash
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.whatif.questions import Answer, Question
    from ddltrace.dashboard.workspace import OpenTrace, Workspace

PATH: Final = "/what-if"

_FIELDS: Final = (
    ("strategy", "Strategy", "such as bf16 or ddp:bucket_mb=4"),
    ("ranks", "Ranks", "each with its batch"),
    ("hosts", "Hosts", "with the same number of ranks"),
    ("bandwidth", "Bandwidth of a host", "such as 25gbit"),
    ("latency", "Latency", "one way, such as 20us"),
    ("without-straggler", "Without straggler", "a rank that works as the others"),
    ("straggler", "Straggler", "RANK=TIME, such as 1=40ms"),
    ("faster", "Faster", "NAME=FACTOR, such as compute=2"),
    ("batch-size", "Batch size", "examples of a rank"),
    ("accumulate", "Accumulate", "batches for each exchange"),
)
_BAR_PX: Final = 26


def what_if_page(opened: OpenTrace, address: Address) -> Component:
    """The page for one trace. Answers are computed after a click, not when it is opened."""
    del address
    fields = [
        html.Div(
            [
                html.Label(title, htmlFor=f'{{"change":"{name}"}}'),  # as Dash writes the id
                dcc.Input(id={"change": name}, type="text", debounce=True),
                html.Span(hint),
            ],
            className="field",
        )
        for name, title, hint in _FIELDS
    ]
    return html.Main(
        [
            html.Section(
                [
                    html.H1("How long would a step take?"),
                    html.P(
                        "The steps of the trace are replayed with the changes below, all of them "
                        "together. The job is not run.",
                        className="lead",
                    ),
                ],
                className="headline",
            ),
            card(
                "Changes",
                html.Div(fields, className="fields"),
                html.Div(
                    [
                        html.Button("Ask", id="what-if-ask", className="action"),
                        html.Button("Every strategy", id="what-if-all", className="action second"),
                    ],
                    className="actions",
                ),
                hint="Leave a field empty to keep what the trace has.",
                wide=True,
            ),
            dcc.Loading(
                html.Div(id="what-if-result", **{"aria-live": "polite"}),
                delay_show=300,
                custom_spinner=html.Div(className="spinner"),
            ),
        ],
        className="page what-if",
    )


def add_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    """Answers the questions of the page."""

    def ask(
        one: int | None,
        every: int | None,
        texts: list[str | None],
        search: str | None,
        theme: str | None,
    ) -> Any:
        if (not one and not every) or len(texts) != len(_FIELDS):
            return no_update
        asked = dict(zip((name for name, _, _ in _FIELDS), texts, strict=True))
        try:
            opened = workspace.get(Address.parse(search).trace)
            return answers_of(
                opened,
                asked,
                every=ctx.triggered_id == "what-if-all",
                theme=parse_theme(theme),
            )
        except DdltraceError as error:
            return html.P(printable(str(error)), className="warning", role="alert")

    app.callback(
        Output("what-if-result", "children"),
        Input("what-if-ask", "n_clicks"),
        Input("what-if-all", "n_clicks"),
        State({"change": ALL}, "value"),
        State("url", "search"),
        State("theme", "data"),
        prevent_initial_call=True,
    )(ask)

    def recolor(theme: str | None, drawn: Any) -> Any:
        import plotly.graph_objects as go

        try:
            return dress(go.Figure(drawn), parse_theme(theme)) if drawn else no_update
        except (KeyError, TypeError, ValueError):
            return no_update  # not a figure of this page

    app.callback(
        Output("what-if-figure", "figure"),
        Input("theme", "data"),
        State("what-if-figure", "figure"),
        prevent_initial_call=True,
    )(recolor)


def answers_of(
    opened: OpenTrace, texts: dict[str, str | None], *, every: bool, theme: Any
) -> list[Component]:
    """The answers to what the fields ask.

    Args:
        texts: Name of a field -> its text.
        every: Whether to ask about every strategy.
        theme: Of the figure.

    Raises:
        DdltraceError: A field cannot be read, or the trace cannot be replayed.
    """
    from ddltrace.analyzer.whatif.questions import WARN

    question = _question({name: (text or "").strip() for name, text in texts.items()})
    asked = opened.what_if
    if every:
        if question.strategy is not None:
            raise UsageError("Every strategy: leave the field Strategy empty")
        specs = require_extension("whatif", "Every strategy").applicable()
        answers = asked.ask_strategies(question, specs)
    elif question.to_json():
        answers = [asked.ask(question)]
    else:
        raise UsageError("Nothing is asked: fill in at least one field")
    known = [each for each in answers if each.refused is None]
    error = abs(asked.self_replay_error)
    hint = (
        f"{time_text(asked.baseline_us)} per step in the trace; a replay of the steps as they are "
        f"differs by {share_text(error)}"
    )
    parts: list[Component] = []
    if error > WARN:
        text = "A replay of the steps as they are is more than 2 % off: answers are less certain."
        parts.append(html.P(text, className="warning"))
    if known:
        figure = _figure(asked.baseline_us, known)
        drawn = dcc.Graph(
            id="what-if-figure",
            figure=dress(figure, theme),
            config=GRAPH_CONFIG,
            style={"height": f"{figure.layout.height:.0f}px"},
        )
        graph = html.Div([drawn, save_buttons()], className="graph")
        parts.append(card("Time per step", graph, hint="Lines are 90 % intervals.", wide=True))
        parts.append(card("Answers", _table(known), hint=hint, wide=True))
    refused = [each for each in answers if each.refused is not None]
    if refused:
        rows = [[printable(_text(each)), printable(each.refused or "")] for each in refused]
        heads = ["question", "reason"]
        parts.append(card("Not known", table(heads, rows, text_columns=2), wide=True))
    return parts or [empty("No answers")]


def _question(texts: dict[str, str]) -> Question:
    from ddltrace.analyzer.formatting.quantities import parse_bandwidth, parse_time
    from ddltrace.analyzer.whatif.questions import Question, read_faster, read_straggler

    def number(name: str, least: int) -> int | None:
        text = texts[name]
        if not text:
            return None
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise UsageError(f"{name}: {text!r:.20} is not a whole number of at least {least}")
        return int(text)

    return Question(
        strategy=texts["strategy"] or None,
        ranks=number("ranks", 1),
        hosts=number("hosts", 1),
        bandwidth=parse_bandwidth(texts["bandwidth"]) if texts["bandwidth"] else None,
        latency=parse_time(texts["latency"], "Latency") if texts["latency"] else None,
        without_straggler=number("without-straggler", 0),
        straggler=read_straggler(texts["straggler"]) if texts["straggler"] else None,
        faster=(read_faster(texts["faster"]),) if texts["faster"] else (),
        batch_size=number("batch-size", 1),
        accumulate=number("accumulate", 1),
    )


def _text(answer: Answer) -> str:
    from ddltrace.analyzer.whatif.questions import describe

    return describe(answer.question)


def _table(answers: Sequence[Answer]) -> Component:
    rows = [
        [
            printable(_text(answer)),
            time_text(answer.step_us),
            f"{time_text(answer.low_us)} to {time_text(answer.high_us)}",
            f"{answer.speedup or 0:.2f}",
        ]
        for answer in answers
    ]
    return table(["question", "per step", "90 % interval", "speed-up"], rows)


def _figure(baseline_us: float, answers: Sequence[Answer]) -> go.Figure:
    """Bars of the trace as it is and of every answer, with their intervals."""
    from ddltrace.analyzer.report.figures import base_figure, label

    figure = base_figure(height=90 + _BAR_PX * (len(answers) + 1))
    names = ["as in the trace", *(label(_text(answer)) for answer in answers)]
    times = [baseline_us, *(answer.step_us or 0.0 for answer in answers)]
    high = [0.0, *((each.high_us or 0.0) - (each.step_us or 0.0) for each in answers)]
    low = [0.0, *((each.step_us or 0.0) - (each.low_us or 0.0) for each in answers)]
    figure.add_bar(
        x=[us / 1e3 for us in times],
        y=names,
        orientation="h",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [us / 1e3 for us in high],
            "arrayminus": [us / 1e3 for us in low],
        },
        meta={"role": "series-0"},
        name="time per step",
    )
    figure.update_xaxes(title="ms per step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(showlegend=False)
    return figure
