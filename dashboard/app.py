"""The Dash app: shell, pages by address, and the callbacks that fill them."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, Final, TypedDict

import dash
from dash import ALL, MATCH, Input, Output, State, ctx, dcc, html, no_update

from ddltrace.analyzer.formatting.units import printable
from ddltrace.dashboard.address import EXPERIMENTS_PATH, Address
from ddltrace.dashboard.callbacks import CheckedDash, triggered
from ddltrace.dashboard.errors import add_error_answers, print_error
from ddltrace.dashboard.pages import (
    critical_path_page,
    live_page,
    range_difference,
    sql_page,
    what_if_page,
)
from ddltrace.dashboard.pages.page_list import PAGES, Page, make_figure, page_at
from ddltrace.dashboard.pages.run_routes import add_run_routes
from ddltrace.dashboard.pages.timeline_page import (
    event_panel,
    piece_panel,
    place,
    range_panel,
)
from ddltrace.dashboard.pages.timeline_routes import add_routes
from ddltrace.dashboard.stored.marks import Mark, save_marks
from ddltrace.dashboard.theme import dress, parse_theme, style_sheet
from ddltrace.dashboard.timeline.path_lane import NO_RANK
from ddltrace.dashboard.widgets import empty, failed
from ddltrace.tracer.errors import DdltraceError, TraceError

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.workspace import Workspace

# Runs before the first paint, so that a dark page never flashes white, and before anything reads
# the address: the token shall not get into links, nor stay where others see it.
_EARLY_SCRIPT: Final = (
    "var u=new URL(location.href);if(u.searchParams.has('token')){u.searchParams.delete('token');"
    "history.replaceState(history.state,'',u)}"
    "try{var t=localStorage.getItem('ddltrace-theme')}catch(e){}"
    "document.documentElement.dataset.theme="
    "t||(matchMedia('(prefers-color-scheme: dark)').matches?'dark':'light');"
)

_INDEX: Final = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="/assets/icon.svg">
<script>EARLY_SCRIPT</script>
<style>STYLE_SHEET</style>
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""

_READ_THEME: Final = "() => document.documentElement.dataset.theme"
_SWITCH_THEME: Final = """(clicks) => {
    if (!clicks) return window.dash_clientside.no_update;
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("ddltrace-theme", theme); } catch (error) { /* private window */ }
    return theme;
}"""

# Navigates as dcc.Link does. dcc.Location cannot: it keeps an address without the part after #,
# which the timeline writes, and would go back to it.
_GO: Final = """(address) => {
    if (!address) return;
    history.pushState({}, "", address);
    window.dispatchEvent(new PopStateEvent("popstate"));
}"""


class _Refresh(TypedDict):
    """The id of the timer of an experiment's results."""

    version: str


class _Reload(TypedDict):
    """The id of the button that reads a trace again."""

    trace: int


class _Figure(TypedDict):
    """The id of a figure."""

    name: str


class _Selected(TypedDict):
    """An event on the timeline, or the id of the button that leads to it."""

    rank: int
    event: int


def create_app(workspace: Workspace) -> dash.Dash:
    """Creates the dashboard of some traces. `ddltrace.dashboard.access` decides who may use it.

    Args:
        workspace: The traces.

    Returns:
        The Dash app; its ``server`` is the WSGI application.
    """
    app = CheckedDash(
        "ddltrace.dashboard",
        title="ddltrace",
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        add_log_handler=False,
        enable_mcp=False,
        index_string=_INDEX.replace("EARLY_SCRIPT", _EARLY_SCRIPT).replace(
            "STYLE_SHEET", style_sheet()
        ),
    )
    app.enable_dev_tools(debug=False, dev_tools_disable_version_check=True)
    app.layout = lambda: _shell(workspace)
    _add_shell_callbacks(app, workspace)
    _add_figure_callbacks(app, workspace)
    _add_timeline_callbacks(app, workspace)
    _add_step_callbacks(app)
    _add_sql_callbacks(app, workspace)
    if workspace.runs is not None:
        from ddltrace.dashboard.pages.run_callbacks import add_run_callbacks

        add_run_callbacks(app, workspace, workspace.runs)
    live_page.add_callbacks(app, workspace)
    critical_path_page.add_callbacks(app, workspace)
    what_if_page.add_callbacks(app, workspace)
    range_difference.add_callbacks(app, workspace)
    add_routes(app.server, workspace)
    add_run_routes(app.server, workspace)
    add_error_answers(app.server)
    _secure(app)
    # Dash prepares itself during its first request: another one at the same time would get a page
    # without scripts, and scripts are not served before that.
    app.server.test_client().get("/")
    return app


def _trace_options(workspace: Workspace) -> list[dict[str, Any]]:
    return [{"label": opened.title, "value": opened.number} for opened in workspace.traces]


def _shell(workspace: Workspace) -> html.Div:
    options = _trace_options(workspace)
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="theme"),
            dcc.Store(id="go"),
            html.Header(
                [
                    dcc.Link(
                        [html.Img(src="/assets/icon.svg", alt=""), html.Span("ddltrace")],
                        href="/",
                        className="brand",
                    ),
                    html.Nav(id="nav", **{"aria-label": "Pages"}),
                    html.Div(
                        dcc.Dropdown(
                            options,
                            0,
                            id="trace",
                            clearable=False,
                            searchable=False,
                            className="chooser",
                        )
                        if len(options) > 1 or workspace.may_grow
                        else html.Span(
                            options[0]["label"] if options else "", className="trace-title"
                        ),
                        className="trace-choice",
                        id="trace-choice",
                    ),
                    # `assets/save.js` handles the click.
                    html.Button(
                        "Save page",
                        id="save-page",
                        className="tl-button",
                        title="Save page as HTML: one file that needs no server",
                        **{"aria-label": "Save page as HTML"},
                    ),
                    html.Button(
                        html.Span(className="theme-icon"),
                        id="switch-theme",
                        className="icon-button",
                        title="Light or dark",
                        **{"aria-label": "Switch between light and dark"},
                    ),
                ],
                className="top",
            ),
            dcc.Loading(
                html.Div(id="page"),
                delay_show=250,
                custom_spinner=html.Div(
                    [html.Div(className="spinner"), html.P("Reading the trace …")],
                    className="page-loading",
                ),
                parent_className="page-parent",
                target_components={"page": "children"},
            ),
        ],
        className="shell",
        # `assets/server_gone.js` shows it.
        **{"data-command": workspace.command},
    )


def _add_shell_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    app.clientside_callback(
        _READ_THEME,
        Output("theme", "data"),
        Input("url", "pathname"),
    )
    app.clientside_callback(
        _SWITCH_THEME,
        Output("theme", "data", allow_duplicate=True),
        Input("switch-theme", "n_clicks"),
        prevent_initial_call=True,
    )

    def show_page(pathname: str | None, search: str | None) -> tuple[Any, Any]:
        address = Address.parse(search)
        page = page_at(pathname or "/")
        links = [
            dcc.Link(
                entry.title,
                href=f"{entry.path}?trace={address.trace}",
                className="here" if entry is page else "",
            )
            for entry in PAGES
            if entry is page or _is_offered(workspace, entry, address)
        ]
        if page is None:
            return html.Main(empty("There is no such page"), className="page"), links
        main = page_content(workspace, page, address)
        banner = None
        if page.is_of_trace and address.trace < len(workspace.traces):
            banner = live_page.running_banner(workspace, workspace.get(address.trace))
        return main if banner is None else [banner, main], links

    app.callback(
        Output("page", "children"),
        Output("nav", "children"),
        Input("url", "pathname"),
        Input("url", "search"),
    )(show_page)

    def refresh(_: list[int | None], search: str | None) -> Any:
        shown = triggered(_Refresh)
        if shown is None:
            return no_update
        from ddltrace.dashboard.pages import experiments_page

        address = Address.parse(search)
        try:
            if not experiments_page.has_changed(workspace, address, shown["version"]):
                return no_update
            return experiments_page.experiment_results(workspace, address)
        except TraceError as error:
            return [html.P(str(error), className="warning")]

    app.callback(
        Output("experiment-results", "children"),
        Input({"type": "refresh", "version": ALL}, "n_intervals"),
        State("url", "search"),
        prevent_initial_call=True,
    )(refresh)

    app.clientside_callback(_GO, Input("go", "data"))

    def reload(clicks: list[int | None], pathname: str | None, search: str | None) -> Any:
        button = triggered(_Reload)
        if not any(clicks) or button is None:
            return no_update
        try:
            workspace.reopen(button["trace"])
        except TraceError as error:
            return failed(str(error))
        return show_page(pathname, search)[0]

    app.callback(
        Output("page", "children", allow_duplicate=True),
        Input({"type": "reload", "trace": ALL}, "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )(reload)

    if len(workspace.traces) > 1 or workspace.may_grow:
        _add_choice_callbacks(app, workspace)


def page_content(workspace: Workspace, page: Page, address: Address) -> Component:
    """A page, or the reason why it cannot be shown: else the browser would keep the last page."""
    try:
        if page.is_of_trace:
            workspace.reopen_if_empty(address.trace)
        main = page.make(workspace, address)
    except TraceError as error:
        main = failed(str(error))
    except Exception as error:  # noqa: BLE001 - shown, and printed for a report
        print_error()
        main = failed(printable(f"an error in ddltrace, {type(error).__name__}: {error}"))
    setattr(main, "data-page", page.name)
    return main


def _is_offered(workspace: Workspace, page: Page, address: Address) -> bool:
    """Whether the navigation offers a page: not without an experiment, or a job that runs."""
    if page.path == EXPERIMENTS_PATH:
        return bool(workspace.experiments) or workspace.runs is not None
    if page.path == live_page.PATH:
        return address.trace < len(workspace.traces) and workspace.is_running(address.trace)
    return True


def _add_choice_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    """Keeps the address and the selection of traces consistent."""

    def show_choice(
        pathname: str | None, search: str | None
    ) -> tuple[list[dict[str, Any]], int | None, bool]:
        number = Address.parse(search).trace
        hidden = pathname in ("/compare", EXPERIMENTS_PATH, "/traces")
        options = _trace_options(workspace)
        return options, number if number < len(options) else None, hidden

    app.callback(
        Output("trace", "options"),
        Output("trace", "value"),
        Output("trace-choice", "hidden"),
        Input("url", "pathname"),
        Input("url", "search"),
    )(show_choice)

    def choose_trace(value: int | None, search: str | None, pathname: str | None) -> Any:
        if value is None or pathname == "/compare" or Address.parse(search).trace == value:
            return no_update
        return f"?trace={value}"

    app.callback(
        Output("go", "data"),
        Input("trace", "value"),
        State("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )(choose_trace)

    def choose_pair(a: int | None, b: int | None, search: str | None) -> Any:
        address = Address.parse(search)
        shown = address.number("a", 0), address.number("b", 1)
        if a is None or b is None or shown == (a, b):
            return no_update
        return f"?a={a}&b={b}&trace={address.trace}"

    app.callback(
        Output("go", "data", allow_duplicate=True),
        Input("compare-a", "value"),
        Input("compare-b", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )(choose_pair)


def _add_figure_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    def draw(theme: str | None, place_id: _Figure, search: str | None) -> Any:
        if theme is None:
            return no_update
        try:
            figure = make_figure(workspace, place_id["name"], Address.parse(search))
        except TraceError:
            return no_update  # the page itself shows the error
        return no_update if figure is None else dress(figure, parse_theme(theme))

    app.callback(
        Output({"type": "figure", "name": MATCH}, "figure"),
        Input("theme", "data"),
        State({"type": "figure", "name": MATCH}, "id"),
        State("url", "search"),
    )(draw)


def _add_timeline_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    def show_details(
        selected: _Selected | None,
        measured: list[int] | None,
        ranks: list[int] | None,
        number: int,
    ) -> tuple[Any, Any]:
        try:
            opened = workspace.get(number)
            if (
                measured
                and ctx.triggered_id == "timeline"
                and "timeline.range" in ctx.triggered_prop_ids
            ):
                return range_panel(opened, measured[0], measured[-1], ranks or ()), []
            if selected:
                rank, event = selected["rank"], selected["event"]
                if rank == NO_RANK:
                    return piece_panel(opened, event)
                return event_panel(opened, rank, event)
        except (TraceError, ValueError) as error:
            return [html.P(str(error), className="warning")], []
        return [], []

    app.callback(
        Output("details", "children"),
        Output("timeline", "flow"),
        Input("timeline", "selected"),
        Input("timeline", "range"),
        State("timeline", "ranks"),
        State("timeline", "trace"),
    )(show_details)

    def keep_marks(marks: list[Mark] | None, number: int) -> Any:
        try:
            save_marks(workspace.get(number).trace, marks or [])
        except TraceError:
            return no_update
        except OSError as error:
            return f"The marks cannot be kept: {error.strerror}"
        return ""

    app.callback(
        Output("timeline", "unsaved"),
        Input("timeline", "marks"),
        State("timeline", "trace"),
        prevent_initial_call=True,
    )(keep_marks)

    def go_to(clicks: list[int | None], number: int) -> Any:
        target = triggered(_Selected)
        if not any(clicks) or target is None:
            return no_update
        try:
            found = place(workspace.get(number), target["rank"], target["event"])
        except (TraceError, ValueError):
            return no_update
        return no_update if found is None else found

    app.callback(
        Output("timeline", "goto"),
        Input({"type": "goto", "rank": ALL, "event": ALL}, "n_clicks"),
        State("timeline", "trace"),
        prevent_initial_call=True,
    )(go_to)


def _add_step_callbacks(app: dash.Dash) -> None:
    """Puts the step that was chosen on a page into the address."""

    def choose(step: int | None, field: str, search: str | None) -> Any:
        address = Address.parse(search)
        key = "step_b" if field == "compare-step-b" else "step"
        if step == (address.number(key, 0) if address.text(key) else None):
            return no_update
        return address.link("", **{key: step})

    for field in ("compare-step", "compare-step-b", "tensor-step"):
        app.callback(
            Output("go", "data", allow_duplicate=True),
            Input(field, "value"),
            State(field, "id"),
            State("url", "search"),
            prevent_initial_call=True,
        )(choose)


def _add_sql_callbacks(app: dash.Dash, workspace: Workspace) -> None:
    def run(clicks: int | None, statement: str | None, search: str | None) -> tuple[Any, Any]:
        if not clicks or statement is None or not statement.strip():
            return no_update, no_update
        address = Address.parse(search)
        try:
            opened = workspace.get(address.trace)
        except TraceError:
            return no_update, no_update  # the page itself shows the error
        opened.ask(statement)
        # The statement goes into the address, and the page shows its rows; at once if it is there.
        if address.text("q") == statement:
            return no_update, sql_page.rows_of(opened, statement)
        return address.link("", q=statement), no_update

    app.callback(
        Output("go", "data", allow_duplicate=True),
        Output("sql-result", "children"),
        Input("sql-run", "n_clicks"),
        State("sql-text", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )(run)

    def save(clicks: int | None, statement: str | None, search: str | None) -> tuple[Any, Any]:
        if not clicks or statement is None or not statement.strip():
            return no_update, no_update
        address = Address.parse(search)
        try:
            opened = workspace.get(address.trace)
            opened.ask(statement)
            text = sql_page.as_csv(opened.query(statement))
        except DdltraceError:
            return no_update, address.link("", q=statement)  # the page shows the error
        return {"content": text, "filename": "query.csv", "type": "text/csv"}, no_update

    app.callback(
        Output("sql-file", "data"),
        Output("go", "data", allow_duplicate=True),
        Input("sql-csv", "n_clicks"),
        State("sql-text", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )(save)


def _secure(app: dash.Dash) -> None:
    """Lets the browser load resources from this server only."""
    digest = base64.b64encode(hashlib.sha256(_EARLY_SCRIPT.encode()).digest()).decode()
    scripts = " ".join(["'self'", f"'sha256-{digest}'", *app.csp_hashes()])
    policy = (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )

    def add_headers(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        # Servers of others on other ports of this machine count as the same site.
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response

    app.server.after_request(add_headers)
