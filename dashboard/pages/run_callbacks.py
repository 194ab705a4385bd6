"""Callbacks of the form that starts an experiment; the routes start it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypedDict

from dash import ALL, Input, Output, State, no_update

from ddltrace.dashboard.callbacks import triggered
from ddltrace.dashboard.pages.run_form import check_text, panel_content, with_technique
from ddltrace.dashboard.pages.run_routes import CANCEL_PATH, START_PATH, TOKEN_HEADER
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    import dash

    from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
    from ddltrace.dashboard.workspace import Workspace
    from ddltrace.experiments.harness.results import Results

FIELDS: Final = (
    "strategies",
    "job",
    "ranks",
    "steps",
    "warmup",
    "repeats",
    "hosts",
    "bandwidth",
)

_POST: Final = """
    const post = async (path, token, body) => {
        try {
            const answer = await fetch(path, {
                method: "POST",
                headers: {"Content-Type": "application/json", "TOKEN_HEADER": token},
                body: JSON.stringify(body),
            });
            return await answer.json();
        } catch (error) {
            return {error: "the server does not answer: is ddltrace dashboard still running?"};
        }
    };
""".replace("TOKEN_HEADER", TOKEN_HEADER)

_START: Final = f"""async (clicks, token, ...values) => {{
    const same = window.dash_clientside.no_update;
    if (!clicks) return [same, same];
    {_POST}
    const names = {list(FIELDS)};
    const body = Object.fromEntries(names.map((name, i) => [name, values[i] ?? null]));
    let result = await post("{START_PATH}", token, body);
    if (result.confirm) {{
        if (!await window.ddltraceConfirm(result.command)) return ["", same];
        result = await post("{START_PATH}", token, {{...body, confirmed: result.confirm}});
    }}
    if (result.error) return [result.error, same];
    const search = new URLSearchParams(location.search);
    for (const key of ["strategies", "job"]) search.delete(key);
    search.set("experiment", result.experiment);
    return ["", location.pathname + "?" + search];
}}"""

_CANCEL: Final = f"""async (clicks, token) => {{
    if (!clicks) return window.dash_clientside.no_update;
    {_POST}
    const result = await post("{CANCEL_PATH}", token, {{}});
    return result.error || "";
}}"""


class _Add(TypedDict):
    """The id of a button that adds a technique."""

    name: str
    combine: int


class _Parameter(TypedDict):
    """The id of the field of a technique's parameter."""

    name: str
    key: str


def add_run_callbacks(app: dash.Dash, workspace: Workspace, runs: AllowedRuns) -> None:
    """Adds the callbacks of the form and of the panel of the last run."""
    app.clientside_callback(
        _START,
        Output("run-error", "children"),
        Output("go", "data", allow_duplicate=True),
        Input("run-start", "n_clicks"),
        State("run-token", "data"),
        *(State(f"run-{name}", "value") for name in FIELDS),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        _CANCEL,
        Output("run-cancel-error", "children"),
        Input("run-cancel", "n_clicks"),
        State("run-token", "data"),
        prevent_initial_call=True,
    )

    def add(
        clicks: list[int | None],
        values: list[str | int | float | None],
        ids: list[_Parameter],
        text: str | None,
    ) -> Any:
        button = triggered(_Add)
        if button is None or not any(clicks):
            return no_update
        given = [
            (about["key"], value)
            for about, value in zip(ids, values, strict=False)
            if about["name"] == button["name"]
        ]
        return with_technique(text or "", button["name"], given, combine=bool(button["combine"]))

    app.callback(
        Output("run-strategies", "value"),
        Input({"type": "run-add", "name": ALL, "combine": ALL}, "n_clicks"),
        State({"type": "run-parameter", "name": ALL, "key": ALL}, "value"),
        State({"type": "run-parameter", "name": ALL, "key": ALL}, "id"),
        State("run-strategies", "value"),
        prevent_initial_call=True,
    )(add)
    app.callback(Output("run-check", "children"), Input("run-strategies", "value"))(check_text)

    def poll(_: int | None) -> tuple[Any, bool, bool]:
        state = runs.control.state()
        if state is None:
            return [], True, True
        results = _results(workspace, str(state.directory))
        return panel_content(state, results), not state.is_running, False

    app.callback(
        Output("run-state", "children"),
        Output("run-cancel", "hidden"),
        Output("run-panel", "hidden"),
        Input("run-poll", "n_intervals"),
    )(poll)


def _results(workspace: Workspace, directory: str) -> Results | None:
    """The results of a started run so far."""
    for experiment in workspace.experiments:
        if str(experiment.directory) == directory:
            try:
                return experiment.results
            except TraceError:
                return None
    return None
