"""``ddltrace dashboard``: shows traces in the browser."""

from __future__ import annotations

import threading

import click

from ddltrace.tracer.optional_packages import require_extra


@click.command(
    epilog="\b\nExamples:\n"
    "  ddltrace dashboard my-trace\n"
    "  ddltrace dashboard before after      compare two runs\n"
    "  ddltrace dashboard my-trace --no-browser --port 9000"
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Everyone who can reach it can read the traces.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port to listen on.  [default: the first free one from 8050 on]",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def dashboard(traces: tuple[str, ...], host: str, port: int | None, no_browser: bool) -> None:
    """Show traces in the browser: overview, timeline, comparison.

    Serves until interrupted with Ctrl-C. All files come from this machine; no network is needed.
    """
    require_extra("dashboard", "ddltrace dashboard")
    from ddltrace.analyzer.trace.opened_trace import open_trace
    from ddltrace.dashboard.hosts import is_loopback
    from ddltrace.dashboard.server import FIRST_PORT, bind, open_browser, serve
    from ddltrace.dashboard.workspace import Workspace

    opened = [open_trace(path) for path in traces]
    listening = bind(host, port)
    if port is None and (taken := listening.getsockname()[1]) != FIRST_PORT:
        click.echo(f"port {FIRST_PORT} is taken, using {taken}", err=True)
    loopback = is_loopback(listening.getsockname()[0])
    if not loopback:
        click.echo(
            f"listening on {host}: everyone who can reach this machine can read the traces",
            err=True,
        )
    from ddltrace.dashboard.app import create_app

    workspace = Workspace(opened)
    app = create_app(workspace, loopback=loopback)

    def ready(url: str) -> None:
        click.echo(f"Dashboard: {url}  (Ctrl-C ends it)")
        warm = threading.Thread(
            target=workspace.warm_up,
            args=(lambda text: click.echo(text, err=True),),
            name="warm-up",
            daemon=True,
        )
        warm.start()
        if not no_browser:
            open_browser(url)

    serve(app.server, listening, ready)
