"""The command ``ddltrace whatif``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddltrace.analyzer.formatting.quantities import parse_bandwidth, parse_time
from ddltrace.analyzer.formatting.terminal import (
    TextTable,
    has_colors,
    layout,
    terminal_width,
)
from ddltrace.analyzer.formatting.units import change_text, share_text, time_text
from ddltrace.analyzer.importers.import_options import communication_kernels_option
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.storage.location import Location, location_of
from ddltrace.tracer.trace.arrow_arrays import without_pandas

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.whatif.questions import Answer, Question, WhatIf

without_pandas()  # only the command line imports this module


@click.command(
    epilog="""\b
Examples:
  ddltrace whatif first-trace
  ddltrace whatif first-trace --hosts 4 --bandwidth 10gbit
  ddltrace whatif first-trace --ranks 64 --hosts 8 --bandwidth 25gbit --latency 20us
  ddltrace whatif first-trace --without-straggler 1
  ddltrace whatif first-trace --faster backward=1.5 --json
  ddltrace whatif first-trace --strategy bf16
  ddltrace whatif first-trace --strategy wfbp --output predicted
  ddltrace whatif first-trace --all
""",
)
@click.argument("traces", nargs=-1, required=True, type=location_of, metavar="TRACE...")
@click.option("--strategy", metavar="SPEC", help="A strategy of ddltrace experiment list.")
@click.option(
    "--ranks", type=click.IntRange(1), metavar="N", help="Ranks, each with its batch as now."
)
@click.option(
    "--hosts", type=click.IntRange(1), metavar="N", help="Hosts, with the same number of ranks."
)
@click.option("--bandwidth", metavar="RATE", help="Of each host's link, such as 25gbit.")
@click.option("--latency", metavar="TIME", help="Between two hosts, one way, such as 20us.")
@click.option(
    "--without-straggler", type=int, metavar="RANK", help="The rank works as the others do."
)
@click.option(
    "--straggler", metavar="RANK=TIME", help="The rank takes longer in each step, such as 1=40ms."
)
@click.option(
    "--faster",
    multiple=True,
    metavar="NAME=FACTOR",
    help="A layer, a kernel or a category (compute, update, data, copy, host) is faster; repeat "
    "it for more.",
)
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Examples of a rank.")
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    metavar="N",
    help="Batches for each exchange and update; times are per batch.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="What ddltrace experiment calibrate has measured.",
)
@click.option("--all", "every", is_flag=True, help="Ask about every strategy, the fastest first.")
@click.option(
    "--search",
    type=click.Choice(["bucket", "slice", "credit"]),
    help="Find the best size of DDP's buckets, of P3's slices, or of ByteScheduler's credit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Write the predicted steps as a trace, to look at beside TRACE.",
)
@click.option(
    "--force", is_flag=True, help="Answer even if a replay of the steps as they are is 10 % off."
)
@communication_kernels_option
def whatif(
    *,
    traces: tuple[Location, ...],
    strategy: str | None,
    ranks: int | None,
    hosts: int | None,
    bandwidth: str | None,
    latency: str | None,
    without_straggler: int | None,
    straggler: str | None,
    faster: tuple[str, ...],
    batch_size: int | None,
    accumulate: int | None,
    calibration: Path | None,
    every: bool,
    search: str | None,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Predict a step with another network, strategy or number of ranks.

    The steps of TRACE are replayed with the changes that the options describe, all of them
    together. The answer is the time per step with a 90 % interval, or the reason why the trace does
    not hold it. Without options, the command says how well a replay of the unmodified steps gives
    back their time.
    """
    from ddltrace.analyzer.open_trace import open_as_one
    from ddltrace.analyzer.whatif.questions import (
        Question,
        read_faster,
        read_straggler,
        what_if,
    )
    from ddltrace.tracer.extensions import require_extension

    question = Question(
        strategy=strategy,
        ranks=ranks,
        hosts=hosts,
        bandwidth=None if bandwidth is None else parse_bandwidth(bandwidth),
        latency=None if latency is None else parse_time(latency, "--latency"),
        without_straggler=without_straggler,
        straggler=None if straggler is None else read_straggler(straggler),
        faster=tuple(map(read_faster, faster)),
        batch_size=batch_size,
        accumulate=accumulate,
    )
    if (every or search) and strategy is not None:
        raise UsageError(
            "--all and --search choose the strategies themselves: leave out --strategy"
        )
    if output is not None and (every or search or not question.to_json()):
        raise UsageError("--output is for one question: say what is to be different")
    with open_as_one(traces, None) as trace:
        asked = what_if(trace, calibration=calibration)
        asked.answers_anyway = force
        if every or search:
            strategies = require_extension("whatif", "--all" if every else "--search")
            specs = strategies.applicable() if every else strategies.settings(search)
            answers = asked.ask_strategies(question, specs)
        else:
            answers = [asked.ask(question)] if question.to_json() else []
        if output is not None and answers[0].refused is None:
            _write(asked, trace, question, output)
    _print(asked, answers, as_json=as_json)
    if output is not None and answers[0].refused is None:
        shown = " ".join(str(each) for each in (*traces, output))
        click.echo(f"ddltrace: predicted trace in {output}", err=True)
        click.echo(f"ddltrace: next: ddltrace dashboard {shown}", err=True)
    if len(answers) == 1 and answers[0].refused is not None:
        raise click.exceptions.Exit(1)


def _write(asked: WhatIf, trace: Trace, question: Question, output: Path) -> None:
    from ddltrace.analyzer.importers.write_imported import save
    from ddltrace.analyzer.whatif.predicted_trace import predicted_trace
    from ddltrace.analyzer.whatif.questions import Refused, describe

    try:
        program, replayed = asked.predict(question)
        predicted = predicted_trace(trace, program, replayed, describe(question))
    except Refused as reason:
        raise UsageError(f"--output: {reason}") from reason
    save(predicted, output, force=False)


def _print(asked: WhatIf, answers: Sequence[Answer], *, as_json: bool) -> None:
    from ddltrace.analyzer.whatif.questions import REFUSE, WARN, describe

    if as_json:
        document: dict[str, Any] = {
            "schema": "ddltrace.whatif/1",
            "baseline_us": asked.baseline_us,
            "self_replay_error": asked.self_replay_error,
            "answers": [answer.to_json() for answer in answers],
        }
        click.echo(json.dumps(document, indent=1, allow_nan=False))
        return
    click.echo(
        f"{time_text(asked.baseline_us)} per step in the trace "
        f"(median of {counted(len(asked.program.steps) - 1, 'step')}); a replay of them as they "
        f"are differs by {share_text(abs(asked.self_replay_error))}"
    )
    if abs(asked.self_replay_error) > WARN:
        click.echo("warning: more than 2 %: answers are that much less certain")
    rows = [_row(answer) for answer in answers if answer.refused is None]
    if rows:
        heads = ["question", "per step", "90 % interval", "speed-up", "work", "waiting"]
        if any(answer.crowding_us for answer in answers):
            heads.append("crowding")
        rows = [row[: len(heads)] for row in rows]
        click.echo("")
        click.echo(layout([[TextTable(heads, rows)]], terminal_width(), colors=has_colors()))
    for answer in answers:
        if answer.refused is not None:
            click.echo(f"{describe(answer.question)}: not known: {answer.refused}")
    if abs(asked.self_replay_error) > REFUSE and not asked.answers_anyway:
        click.echo("--force answers nevertheless")
    elif not answers:
        click.echo("ask with --bandwidth, --ranks, --strategy, ...: ddltrace whatif --help")
    elif any(answer.question.strategy is not None and not answer.refused for answer in answers):
        best = next(a for a in answers if a.question.strategy is not None and not a.refused)
        click.echo(
            f"\nNext: ddltrace experiment run --strategy ddp --strategy {best.question.strategy} "
            f"-- COMMAND  (runs it and compares)"
        )


def _row(answer: Answer) -> list[str]:
    from ddltrace.analyzer.whatif.questions import describe

    assert answer.compute_us is not None
    assert answer.wait_us is not None
    assert answer.crowding_us is not None
    speedup = "" if answer.speedup is None else f"{answer.speedup:.2f}"
    return [
        describe(answer.question),
        time_text(answer.step_us),
        f"{time_text(answer.low_us)} to {time_text(answer.high_us)}",
        speedup,
        change_text(answer.compute_us),
        change_text(answer.wait_us),
        change_text(answer.crowding_us),
    ]
