"""``ddltrace dashboard``: shows traces in the browser."""

from __future__ import annotations

import click

from ddltrace.analyzer.engine.engine_options import chosen_engine, engine_options
from ddltrace.analyzer.importers.import_options import communication_kernels_option
from ddltrace.tracer.optional_packages import require_extra


@click.command(
    epilog="\b\nExamples:\n"
    "  ddltrace dashboard my-trace\n"
    "  ddltrace dashboard before after      compare two runs\n"
    "  ddltrace dashboard my-experiment     strategies side by side, with their traces\n"
    "  ddltrace dashboard my-trace --allow-run   also start experiments from the page\n"
    "  ddltrace dashboard my-trace --no-browser --port 9000\n"
    "  ddltrace dashboard large-trace --engine dask --scheduler tcp://head:8786"
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. The connection is not encrypted.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port to listen on.  [default: the first free one from 8050 on]",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--no-token",
    is_flag=True,
    help="Let everyone who can reach the address read the traces. By default, only the printed "
    "address opens the pages: it contains a token.",
)
@click.option(
    "--allow-run",
    is_flag=True,
    help="Let the experiments page start experiments on this machine. Everyone who has the token "
    "can start them, so the address must be a loopback address.",
)
@communication_kernels_option
@engine_options
# `ddltrace run --dashboard` starts the server with it: see tracer/launch/beside_job.py.
@click.option("--beside-job", is_flag=True, hidden=True, help="End when standard input is closed.")
def dashboard(  # noqa: PLR0917 - click passes one argument for each option
    traces: tuple[str, ...],
    host: str,
    port: int | None,
    no_browser: bool,
    no_token: bool,
    allow_run: bool,
    engine: str,
    scheduler: str | None,
    beside_job: bool,
) -> None:
    """Show traces, experiments, or folders of both in the browser.

    Prints an address with a token and serves until interrupted with Ctrl-C. A program reads
    ADDRESS/api/0/layout?token=TOKEN, or sends the cookie that the address sets. All files come
    from this machine; no network is needed.
    With --engine dask, a cluster analyzes the traces and builds the timelines of large ones.
    """
    from ddltrace.dashboard.start import FEATURE, Options, serve_dashboard

    require_extra("dashboard", FEATURE, by_import=False)
    options = Options(
        traces=traces,
        host=host,
        port=port,
        no_browser=no_browser,
        no_token=no_token,
        allow_run=allow_run,
        beside_job=beside_job,
    )
    with chosen_engine(engine, scheduler) as chosen:
        serve_dashboard(options, chosen)
