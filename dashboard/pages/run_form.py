"""The form that starts an experiment, and the panel of the last started run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import printable
from ddltrace.dashboard.runs.run_request import LIMITS, read_strategies, shown_words
from ddltrace.dashboard.widgets import card
from ddltrace.experiments.strategy.listing import as_json
from ddltrace.experiments.technique import AXES
from ddltrace.experiments.workloads import WORKLOADS
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
    from ddltrace.dashboard.runs.run_control import RunState
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.experiments.harness.results import Results

_DEFAULTS: Final = ("ddp", "fifo", "wfbp")
_POLL_MS: Final = 1000
_NUMBERS: Final = (
    ("ranks", "Ranks", None, "2 if empty; a trace's command sets its own"),
    ("steps", "Steps", 60, "training steps of each run, warm-up included"),
    ("warmup", "Warm-up", 10, "steps that are not measured"),
    ("repeats", "Repeats", 3, "rounds, each with the next seed; one names no winner"),
    ("hosts", "Hosts", None, "of an emulated network, one rank each; needs root"),
)


def run_card(runs: AllowedRuns, workspace: Workspace, address: Address) -> Component:
    """The form, filled in with the ``strategies`` and the ``job`` of the address."""
    asked = address.text("strategies")
    strategies = asked or "\n".join(_DEFAULTS)
    jobs = _jobs(workspace)
    values = [option["value"] for option in jobs]
    job = address.text("job") if address.text("job") in values else values[0]
    fields = [
        _field(
            f"run-{name}",
            title,
            hint,
            dcc.Input(
                id=f"run-{name}",
                type="number",
                value=value,
                min=LIMITS[name][0],
                max=LIMITS[name][1],
                step=1,
            ),
        )
        for name, title, value, hint in _NUMBERS
    ]
    fields.append(
        _field(
            "run-bandwidth",
            "Bandwidth",
            "of each host's link",
            dcc.Input(id="run-bandwidth", type="text", placeholder="400mbit"),
        )
    )
    body = [
        html.Div(
            [
                html.Div(
                    [
                        html.Label("Strategies, one per line", htmlFor="run-strategies"),
                        dcc.Textarea(id="run-strategies", value=strategies, spellCheck=False),
                        html.P(id="run-check", className="quiet", **{"aria-live": "polite"}),
                        html.H3("Job", id="run-job-title"),
                        dcc.RadioItems(
                            jobs, job, id="run-job", className="choices", labelClassName="choice"
                        ),
                        html.Div(fields, className="fields"),
                        html.P(
                            [
                                "Results and traces go to a new folder in ",
                                html.Code(printable(str(runs.control.folder))),
                                "; the job runs in ",
                                html.Code(printable(str(Path.cwd()))),
                                ".",
                            ],
                            className="quiet",
                        ),
                        html.Div(
                            [
                                html.Button(
                                    "Start the experiment", id="run-start", className="action"
                                ),
                            ],
                            className="actions",
                        ),
                        html.P(id="run-error", className="warning", role="alert"),
                    ]
                ),
                html.Div([html.H3("Catalogue"), *_catalogue()], className="catalogue"),
            ],
            className="run-form",
        ),
        dcc.Store(id="run-token", data=runs.token),
    ]
    return html.Details(
        [html.Summary("Run an experiment"), card("Run an experiment", *body, wide=True)],
        className="run-box",
        id="run-form",
        open=bool(asked) or not workspace.experiments,
    )


def run_panel(runs: AllowedRuns) -> Component:
    """The panel of the last started run; `panel_content` fills it every second."""
    state = runs.control.state()
    return html.Section(
        [
            html.Div(panel_content(state, None), id="run-state"),
            html.Button(
                "Cancel the run",
                id="run-cancel",
                className="action second",
                hidden=state is None or not state.is_running,
            ),
            html.P(id="run-cancel-error", className="warning", role="alert"),
            dcc.Interval(id="run-poll", interval=_POLL_MS),
        ],
        className="card wide run-panel",
        id="run-panel",
        hidden=state is None,
        **{"aria-label": "The run that was started last"},
    )


def panel_content(state: RunState | None, results: Results | None) -> list[Any]:
    """The content of the panel.

    Args:
        state: The run; None if none was started.
        results: Its results so far; None before the first.
    """
    if state is None:
        return []
    texts = {
        "running": "The experiment runs.",
        "cancelling": "The experiment is being cancelled: its job saves its trace and ends.",
        "done": "The experiment is complete.",
        "cancelled": "The experiment was cancelled. The runs that had finished are kept.",
        "failed": f"The experiment ended with status {state.exit_status}.",
    }
    parts: list[Any] = [html.H2(texts[state.status])]
    if results is not None and results.progress.get("total"):
        done, total = results.progress.get("done", 0), results.progress["total"]
        running = (results.progress.get("running") or {}) if state.is_running else {}
        now = f", now {printable(str(running.get('strategy')))}" if running else ""
        parts += [
            html.Progress(value=str(done), max=str(total), **{"aria-label": "finished runs"}),
            html.P(f"{done} of {total} runs are done{now}."),
        ]
    command = " ".join(shown_words(["ddltrace", "experiment", "run", *state.arguments]))
    parts += [
        html.P(html.Code(command, className="command-line")),
        html.P(["Results: ", html.Code(printable(str(state.directory)))], className="quiet"),
    ]
    logs = (("Log", state.log), ("Log of the job", state.job_log))
    for title, text in logs:
        if text.strip():
            parts += [
                html.H3(title),
                html.Pre(_lines(text), className="log", tabIndex="0", **{"aria-label": title}),
            ]
    return parts


def with_technique(
    text: str, name: str, values: Sequence[tuple[str, object]], *, combine: bool
) -> str:
    """The text of the strategies with one more technique.

    Args:
        text: One strategy per line.
        name: Name of the technique or preset.
        values: Its parameters; empty ones keep their defaults.
        combine: Whether it is combined with the last strategy; otherwise it is a separate one.
    """
    given = ",".join(f"{key}={value}" for key, value in values if value not in (None, ""))
    spec = f"{name}:{given}" if given else name
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if combine and lines:
        lines[-1] = f"{lines[-1]}+{spec}"
    else:
        lines.append(spec)
    return "\n".join(lines)


def check_text(text: str | None) -> str:
    """The error in the strategies, or their number."""
    try:
        count = len(read_strategies(text or ""))
    except DdltraceError as error:
        return printable(str(error))
    return f"{count} strateg{'y' if count == 1 else 'ies'}; the first is the baseline."


def _jobs(workspace: Workspace) -> list[dict[str, str]]:
    traces = [
        {
            "label": f"the command of {opened.title}: "
            f"{' '.join(shown_words(opened.trace.run.command))}",
            "value": f"trace:{opened.number}",
        }
        for opened in workspace.traces
        if opened.trace.run.command and _is_own(opened.trace.run.command)
    ]
    workloads = [
        {"label": f"{name}: {info.summary}", "value": f"workload:{name}"}
        for name, info in WORKLOADS.items()
    ]
    return [*workloads, *traces]


def _is_own(command: Sequence[str]) -> bool:
    """Whether a recorded command is the user's job, not a run of an experiment."""
    return not any(word.startswith("ddltrace.experiments") for word in command)


def _field(name: str, title: str, hint: str, control: Any) -> Component:
    return html.Div([html.Label(title, htmlFor=name), control, html.Span(hint)], className="field")


def _catalogue() -> list[Any]:
    listing = as_json()
    groups: list[Any] = []
    for axis in AXES:
        rows = [row for row in listing["techniques"] if row["axis"] == axis and row["selectable"]]
        if rows:
            groups.append(
                html.Details(
                    [html.Summary(axis), *(_technique(row, row["parameters"]) for row in rows)]
                )
            )
    if listing["presets"]:
        rows = [{**row, "needs": [], "modifier": None} for row in listing["presets"]]
        groups.append(html.Details([html.Summary("presets"), *(_technique(r, {}) for r in rows)]))
    return groups


def _technique(row: dict[str, Any], parameters: dict[str, Any]) -> Component:
    name = row["name"]
    about = [html.Strong(name), html.Span(f" {row['summary']}")]
    if row["source"]:
        about.append(html.Em(f" {row['source']}"))
    inputs = [
        html.Label(
            [
                key,
                dcc.Input(
                    id={"type": "run-parameter", "name": name, "key": key},
                    type="text",
                    placeholder=_default_text(parameter),
                ),
            ]
        )
        for key, parameter in parameters.items()
    ]
    buttons = [
        html.Button(
            text,
            id={"type": "run-add", "name": name, "combine": combine},
            className="action second",
            title=title,
            **{"aria-label": f"{title}: {name}"},
        )
        for combine, text, title in (
            (0, "Add", "Add as a strategy of its own"),
            (1, "+ to the last", "Combine with the last strategy"),
        )
        if not (combine == 0 and row["modifier"] == "required")
    ]
    needs = [html.P(f"needs {need}", className="quiet") for need in row["needs"]]
    return html.Div(
        [html.P(about), *needs, html.Div([*inputs, *buttons], className="technique-fields")],
        className="technique",
    )


def _default_text(parameter: dict[str, Any]) -> str:
    default = parameter["default"]
    if isinstance(default, bool):
        return str(default).lower()
    return "its own default" if default is None else str(default)


def _lines(text: str) -> str:
    """A log's lines without control characters."""
    return "\n".join(printable(line) for line in text.splitlines())
