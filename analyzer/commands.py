"""The analyzer's commands."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ddltrace.analyzer.engine.engine_options import chosen_engine, engine_options
from ddltrace.analyzer.importers.import_options import communication_kernels_option
from ddltrace.analyzer.report.warnings import (
    check_recorded,
    report_damage,
    report_ranges,
    report_steps_left_out,
)
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.output_directory import check_new_file
from ddltrace.tracer.peak_option import peak_option
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace.arrow_arrays import without_pandas

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analyzed
    from ddltrace.analyzer.open_trace import Trace


without_pandas()  # only the command line imports this module

_STRICT: Final = click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if it is not known whether a condition of --fail-on holds.  [default: say "
    "so and exit with 0]",
)


class StepRange(click.ParamType[range]):
    """Steps as ``A:B``, B not included; either may be left out."""

    name = "A:B"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> range:
        """Reads ``A:B``."""
        if isinstance(value, range):
            return value
        first, colon, last = str(value).partition(":")
        try:
            start, stop = int(first or 0), int(last or (1 << 31) - 1)
        except ValueError:
            start, stop = 1, 0
        if not colon or start < 0 or stop <= start:
            self.fail(f"{value!r} is not a range of steps: write A:B with A < B, e.g. 10:20")
        return range(start, stop)


@click.command(
    epilog="""\b
Examples:
  ddltrace analyze first-trace
  ddltrace analyze first-trace --full | less
  ddltrace analyze first-trace --json | jq .summary
  ddltrace analyze first-trace --html report.html --steps 10:20
  ddltrace analyze first-trace --format markdown > comment.md
  ddltrace analyze first-trace --to mlflow
  ddltrace analyze kineto-folder --fail-on "overlap_ratio<0.6"
  ddltrace analyze kineto-folder --definitions hta
  ddltrace analyze node-0/trace node-1/trace
  ddltrace analyze rank0.json rank1.json
  ddltrace analyze large-trace --engine dask
  ddltrace analyze /shared/trace --engine dask --scheduler tcp://head:8786 --json
  ddltrace analyze s3://bucket/run --steps 10:11
""",
)
@click.argument("traces", nargs=-1, required=True, type=location_of, metavar="TRACE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
    help="Form of the report; markdown: short, for a comment on a pull request.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--full",
    is_flag=True,
    help="Print all tables.  [default: the verdict and what could make the step shorter]",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the report as one self-contained HTML file.",
)
@click.option("--force", is_flag=True, help="Overwrite the file of --html if it exists.")
@click.option("--steps", type=StepRange(), metavar="A:B", help="Only steps A to B - 1.")
@click.option(
    "--window",
    metavar="NAME|A:B",
    help="Analyze other intervals in place of steps: the annotations of a name (the n-th of each "
    "rank is step n), or one window from A to B microseconds after the trace's begin.",
)
@click.option(
    "--fail-on",
    "fail_on",
    metavar="EXPR",
    multiple=True,
    help='Exit with 3 if EXPR holds, e.g. "overlap_ratio<0.6"; repeat it for more.',
)
@_STRICT
@click.option(
    "--to",
    "tracker",
    type=click.Choice(["mlflow", "wandb", "tensorboard"]),
    help="Also log the summary's numbers and the HTML report to a run of an experiment tracker, "
    "which its own environment variables choose (MLFLOW_TRACKING_URI, WANDB_MODE, ...). "
    "tensorboard: writes to the folder runs/ here.",
)
@click.option(
    "--definitions",
    type=click.Choice(["ddltrace", "hta"]),
    default="ddltrace",
    show_default=True,
    help="hta: give each rank's overlap, idle, compute and kernel time as Holistic Trace "
    "Analysis 0.5.0 does (within 0.05 points, times within 0.05 %), which drops the last step; and "
    "its tables of idle time, queue length and bandwidth of copies. Needs Kineto files.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Memory that the analyzed steps may take, about: if they need more, they are analyzed in "
    "ranges, whose results are merged.  [default: 4GiB]",
)
@peak_option(
    "the job's element type: gives the model FLOPS utilization (mfu) of a trace with level op"
)
@communication_kernels_option
@engine_options
def analyze(
    *,
    traces: tuple[Location, ...],
    form: str,
    as_json: bool,
    full: bool,
    html: Path | None,
    force: bool,
    steps: range | None,
    window: str | None,
    fail_on: tuple[str, ...],
    strict: bool,
    tracker: str | None,
    definitions: str,
    memory_limit: str | None,
    peak_tflops: float | None,
    engine: str,
    scheduler: str | None,
) -> None:
    """Report where the time of a trace goes.

    TRACE is a directory written by ddltrace run, even if the job is running or died, or a file
    or folder of an importable format; or the URL of one in a store (s3://, gs://, hdfs://, or a
    protocol of fsspec), of which only the needed columns and steps are read. To analyze one job
    that ran under several ddltrace run commands, such as one per node, give all their directories;
    of a job whose ranks have a file each, give all files (docs/trace-format.md says how ranks are
    found).
    """
    from ddltrace.analyzer.formatting.quantities import parse_memory_limit
    from ddltrace.analyzer.open_trace import open_as_one
    from ddltrace.analyzer.report.threshold import check_expression
    from ddltrace.analyzer.trace.windows import with_window

    for expression in fail_on:
        check_expression(expression)
    if html is not None:
        require_extra("report", "analyze --html")
        check_new_file(html, "--html", force=force)
    if tracker is not None:
        require_extra("report", f"analyze --to {tracker}")
        require_extra(tracker, f"analyze --to {tracker}")
    if definitions == "hta" and steps is not None:
        raise UsageError("--definitions hta chooses the steps itself: leave out --steps")
    if definitions == "hta" and window is not None:
        raise UsageError("--definitions hta looks at profiler steps: leave out --window")
    limit = None if memory_limit is None else parse_memory_limit(memory_limit)
    with (
        chosen_engine(engine, scheduler) as opened_engine,
        open_as_one(traces, opened_engine) as trace,
    ):
        trace.memory_limit = limit
        opened = trace if window is None else with_window(trace, window)
        opened.peak_tflops = peak_tflops
        form = "json" if as_json else form
        _report(
            opened,
            traces,
            steps,
            definitions,
            form=form,
            full=full,
            html=html,
            fail_on=fail_on,
            strict=strict,
            tracker=tracker,
        )


def _report(
    opened: Trace,
    traces: tuple[Location, ...],
    steps: range | None,
    definitions: str,
    *,
    form: str,
    full: bool,
    html: Path | None,
    fail_on: tuple[str, ...],
    strict: bool,
    tracker: str | None,
) -> None:
    """Analyzes an opened trace and reports on it in the ways that were asked for."""
    from ddltrace.analyzer.analysis import analyze_with_paths
    from ddltrace.analyzer.report.threshold import check_threshold
    from ddltrace.analyzer.trace.suggested_commands import dashboard_command
    from ddltrace.analyzer.whatif.predictions import with_predictions

    by_ranks = None
    if definitions == "hta":
        from ddltrace.analyzer.measures.hta_definitions import hta_ranks

        by_ranks = hta_ranks(opened)
    report_ranges(opened, steps)
    # Paths cost another range of steps in a long trace.
    needs_paths = html is not None or tracker is not None
    analyzed = analyze_with_paths(opened, steps) if needs_paths else None
    analysis = opened.analyze(steps) if analyzed is None else analyzed.analysis
    analysis = with_predictions(opened, analysis)
    if analyzed is not None:
        analyzed = replace(analyzed, analysis=analysis)
    if form == "json":
        document = analysis.to_json() | {"definitions": definitions}
        if by_ranks is not None:
            from ddltrace.analyzer.measures.hta_definitions import by_hta

            document = by_hta(document, by_ranks)
        click.echo(json.dumps(document, indent=1, allow_nan=False))
    elif form == "markdown":
        from ddltrace.analyzer.report.markdown_report import render_markdown

        click.echo(render_markdown(analysis))
    else:
        from ddltrace.analyzer.formatting.terminal import has_colors, layout, terminal_width
        from ddltrace.analyzer.report.text_report import render_first_screen, render_report

        width, colors = terminal_width(), has_colors()
        render_text = render_report if full else render_first_screen
        click.echo(render_text(analysis, width, colors=colors) + "\n")
        if by_ranks is not None:
            from ddltrace.analyzer.measures.hta_definitions import hta_sections

            click.echo(layout(hta_sections(by_ranks), width, colors=colors) + "\n")
        if not full:
            click.echo("All tables: the same command with --full")
        if opened.ranks:
            click.echo(f"Next: {dashboard_command(traces)}")
    if html is not None and analyzed is not None:
        from ddltrace.analyzer.report.html_report import write_html

        write_html(analyzed, opened, html, traces)
        click.echo(f"ddltrace: report in {html}", err=True)
    if tracker is not None and analyzed is not None:
        _log(tracker, analyzed, opened, traces)
    _conclude([check_threshold(analysis.summary, expression) for expression in fail_on], strict)


def _conclude(unknown: Sequence[str | None], strict: bool) -> None:
    """Says which conditions of ``--fail-on`` are not known to hold or not.

    Args:
        unknown: The reason for each condition; None where it is known.
        strict: Whether this is an error.

    Raises:
        DdltraceError: It is one.
    """
    reasons = [reason for reason in unknown if reason is not None]
    for reason in reasons:
        click.echo(f"ddltrace: {reason}", err=True)
    if reasons and strict:
        raise DdltraceError("--strict: not every condition of --fail-on is known")


def _log(tracker: str, analyzed: Analyzed, opened: Trace, traces: tuple[Location, ...]) -> None:
    """Logs an analysis to a run of an experiment tracker."""
    from ddltrace.analyzer.report.html_report import write_html
    from ddltrace.analyzer.report.trackers import log_analysis

    with tempfile.TemporaryDirectory(prefix="ddltrace-") as folder:
        report = Path(folder) / "ddltrace-report.html"
        write_html(analyzed, opened, report, traces)
        place = log_analysis(tracker, opened.name, analyzed.analysis, report)
    click.echo(f"ddltrace: logged to {tracker}: {place}", err=True)


class _WithRuns(click.Command):
    """A command whose option ``--with`` takes all values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Writes ``--with A B`` as ``--with A --with B``."""
        spread: list[str] = []
        collects = False
        for number, word in enumerate(args):
            if word == "--":
                spread += args[number:]
                break
            if word.startswith("-"):
                collects = word == "--with"
                has_value = collects and number + 1 < len(args)
                if not (has_value and not args[number + 1].startswith("-")):
                    spread.append(word)
            else:
                spread += ["--with", word] if collects else [word]
        return super().parse_args(ctx, spread)


@click.command(
    cls=_WithRuns,
    epilog="""\b
Examples:
  ddltrace compare before after
  ddltrace compare before after --json | jq .step_us.verdict
  ddltrace compare main-1 main-2 main-3 --with branch-1 branch-2 branch-3
  ddltrace compare main-* --with branch-* --fail-on "step_us>+5%"
""",
)
@click.argument("traces", nargs=-1, required=True, type=location_of, metavar="TRACE...")
@click.option(
    "--with",
    "after",
    multiple=True,
    type=location_of,
    metavar="TRACE...",
    help="The runs to compare with. All traces before it are runs of the first side.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
@click.option(
    "--fail-on",
    "fail_on",
    metavar="EXPR",
    multiple=True,
    help='Exit with 3 if a change is beyond a limit and more than noise, e.g. "step_us>+5%"; '
    "repeat it for more.",
)
@_STRICT
def compare(
    *,
    traces: tuple[Location, ...],
    after: tuple[Location, ...],
    as_json: bool,
    fail_on: tuple[str, ...],
    strict: bool,
) -> None:
    """Compare two traces, or several runs of two jobs, and distinguish differences from noise.

    Differences are computed over the steady steps of each trace, with a confidence interval over
    the runs. One run a side does not show how much runs differ: the verdict is unknown then, unless
    the difference exceeds what equal runs differ by in docs/measurements.md. Trace each job at
    least three times, in turns.
    """
    from ddltrace.analyzer.compare.comparison import compare as compare_analyses
    from ddltrace.analyzer.compare.comparison import render_comparison
    from ddltrace.analyzer.compare.regression import check_limit, parse_limit
    from ddltrace.analyzer.open_trace import open_trace

    limits = [parse_limit(expression) for expression in fail_on]
    if not after and len(traces) != 2:
        raise UsageError(
            "give two traces, or the runs of both sides: ddltrace compare A1 A2 A3 --with B1 B2 B3"
        )
    sides = (traces, after) if after else (traces[:1], traces[1:])
    opened = [[open_trace(location) for location in side] for side in sides]
    check_recorded([*opened[0], *opened[1]])
    for trace in (*opened[0], *opened[1]):
        report_ranges(trace)
    comparison = compare_analyses(*([trace.analyze() for trace in side] for side in opened))
    for trace in (*opened[0], *opened[1]):
        report_damage(trace)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=1, allow_nan=False))
    else:
        from ddltrace.analyzer.formatting.terminal import has_colors, terminal_width

        click.echo(render_comparison(comparison, terminal_width(), colors=has_colors()))
        click.echo(f"\nNext: ddltrace dashboard {' '.join(map(str, (*sides[0], *sides[1])))}")
    _conclude([check_limit(comparison, limit) for limit in limits], strict)


@click.command(
    epilog="""\b
Examples:
  ddltrace query first-trace "SELECT op, count(*), sum(bytes) FROM messages GROUP BY op"
  ddltrace query first-trace "SELECT * FROM collectives ORDER BY wait_us DESC LIMIT 5"
  ddltrace query first-trace --format csv "FROM critical_path" > path.csv
""",
)
@click.argument("trace", type=location_of)
@click.argument("sql")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="Output format of the rows.",
)
@click.option(
    "--memory-limit",
    default="2GB",
    show_default=True,
    metavar="SIZE",
    help="Memory that the statement and its rows may take; nothing is spilled to disk.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop the statement after this time.",
)
@communication_kernels_option
def query(trace: Location, sql: str, form: str, memory_limit: str, timeout: float) -> None:
    """Run a SQL query over a trace.

    SQL is one SELECT in DuckDB's dialect, or EXPLAIN and a SELECT, over the tables events,
    counters, messages, collectives, all_to_all, connections, goodput, roles, tensors, steps, ranks,
    rank_steps, critical_path, kernels, operators, launches, streams, copies, nccl_events,
    hta_queue_length and hta_copy_bandwidth (docs/sql-reference.md has their columns). Other
    statements are refused: the query can read nothing else and write nothing.
    """
    from ddltrace.analyzer.formatting.quantities import parse_memory_limit
    from ddltrace.analyzer.open_trace import open_trace
    from ddltrace.analyzer.query.rows_as_text import rows_as_text
    from ddltrace.analyzer.query.sql import QueryLimits, run_query

    require_extra("query", "ddltrace query", by_import=False)
    limits = QueryLimits(parse_memory_limit(memory_limit), timeout)
    opened = open_trace(trace)
    check_recorded([opened])
    report_steps_left_out(opened)
    rows = run_query(opened, sql, limits)
    report_damage(opened)
    for text in rows_as_text(rows, form):
        click.echo(text, nl=False)
