"""The commands for a job that runs: ``on``, ``off``, ``level`` and ``attach``."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddltrace.tracer.attach_job import Deliver, Outcome, attach_to, directory_of, ranks_of
from ddltrace.tracer.config import LEVELS
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.switch_orders import give_order, ranges_text

_target = click.argument("target")
_ranks = click.option(
    "--ranks", metavar="R,R,...", help="Only these ranks, such as 0,7.  [default: all]"
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    return _target(_ranks(_json(function)))


@click.command(
    epilog="""\b
Examples:
  ddltrace on trace --steps 50
  ddltrace on 12345 --level comm
  ddltrace on trace --level op --steps 3 --ranks 0,7 --json

TARGET is the trace directory of a job that runs, or the process id of its launcher or of one of
its ranks on this host. The exit status is 1 if a rank cannot follow.""",
)
@_options
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Record N steps, then switch off again.  [default: until off]",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Level of detail.  [default: that with which the job was started]",
)
def on(target: str, ranks: str | None, as_json: bool, steps: int | None, level: str | None) -> int:
    """Record from now on, on all ranks from the same step.

    The job was started by ddltrace run, with --off if nothing was to be recorded at first.
    """
    order = {"action": "on", "steps": steps, "level": level, "ranks": _rank_list(ranks)}
    answer = give_order(target, order)
    if steps is None:
        done = f"recording from step {answer['step']} on"
    else:
        done = f"recording steps {answer['step']} to {(answer['step'] or 0) + steps - 1}"
    return _report(answer, done, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  ddltrace off trace
  ddltrace off 12345 --ranks 3

TARGET is the trace directory of a job that runs, or the process id of its launcher or of one of
its ranks on this host. The exit status is 1 if a rank cannot follow.""",
)
@_options
def off(target: str, ranks: str | None, as_json: bool) -> int:
    """Stop recording, on all ranks at the same step. The job runs on, and can be recorded again."""
    answer = give_order(target, {"action": "off", "ranks": _rank_list(ranks)})
    return _report(answer, f"not recording from step {answer['step']} on", as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  ddltrace level trace comm
  ddltrace level 12345 op --ranks 0

TARGET is the trace directory of a job that runs, or the process id of its launcher or of one of
its ranks on this host. The exit status is 1 if a rank cannot follow.""",
)
@_options
@click.argument("level", type=click.Choice(LEVELS))
def level(target: str, level: str, ranks: str | None, as_json: bool) -> int:
    """Change the level of detail, on all ranks that record from the same step.

    Ranks that do not record now will use it when they are switched on. Level op records the
    operators of three steps.
    """
    order = {"action": "level", "level": level, "ranks": _rank_list(ranks)}
    answer = give_order(target, order)
    done = f"level {level} from step {answer['step']} on, where and when it is recorded"
    return _report(answer, done, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  ddltrace attach 12345
  ddltrace attach 12345 -o trace

PID is the process id of the job's launcher or of one of its ranks. All ranks of the job on this
host are armed. The exit status is 1 if one of them is not."""
)
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Trace directory to create.  [default: ddltrace-trace-DATE-TIME]",
)
def attach(pid: int, output: Path | None) -> int:
    """Arm a running job that was started without ddltrace: see ddltrace on.

    Nothing is recorded until ddltrace on. The job and this command need the same Python, 3.14 or
    later, with the same ddltrace installed. Each rank runs a script that imports ddltrace, on its
    main thread.
    """
    ranks = ranks_of(pid)
    armed = {rank: where for rank in ranks if (where := directory_of(rank)) is not None}
    if len(armed) == len(ranks):
        click.echo(f"process {pid} is armed")
        print_next_command("on", pid, "--steps", 50)
        return 0
    remote_exec: Deliver | None = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        raise UsageError(
            f"process {pid} was started without ddltrace, and Python {platform.python_version()} "
            "cannot attach to it (3.14 and later can): start the job with ddltrace run --off -- "
            "COMMAND, which records nothing until ddltrace on"
        )
    directory = output or Path(time.strftime("ddltrace-trace-%Y%m%d-%H%M%S"))
    for rank, where in armed.items():
        if output is not None and where != output.absolute():
            raise UsageError(f"process {rank} is armed for {where}: leave out -o")
        directory = where
    try:
        outcomes = attach_to([r for r in ranks if r not in armed], directory, deliver=remote_exec)
    except OSError as error:
        raise DdltraceError(f"the script for the job cannot be written: {error}") from error
    return _report_attached(outcomes, list(armed), directory)


def _report_attached(outcomes: list[Outcome], armed: list[int], directory: Path) -> int:
    """Prints what has become of processes; returns the exit status."""
    new = sorted(outcome.rank for outcome in outcomes if outcome.rank is not None)
    if new:
        click.echo(f"armed: ranks {ranges_text(new)}")
    if armed:
        click.echo(f"armed before: processes {', '.join(map(str, armed))}")
    failed = False
    for outcome in outcomes:
        if outcome.error is not None:
            failed = True
            error = " ".join(outcome.error.split())
            click.echo(f"process {outcome.pid} is not armed: {error}")
        elif outcome.rank is None:
            click.echo(f"process {outcome.pid} will be armed when it joins a process group")
    found = len(outcomes) + len(armed)
    world = max((outcome.world_size or 0 for outcome in outcomes), default=0)
    if world > found:
        click.echo(
            f"{found} of {world} ranks were found on this host: attach the others as well, before "
            "ddltrace on"
        )
    if len(new) + len(armed):
        print_next_command("on", directory, "--steps", 50)
    return 1 if failed else 0


def _rank_list(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of ranks like 0,7")
    return sorted({int(part) for part in parts})


def _report(answer: dict[str, Any], done: str, *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(answer))
    else:
        if answer["ranks"]:
            click.echo(f"{done}: ranks {ranges_text(answer['ranks'])}")
        for rank in answer["missing"]:
            click.echo(f"rank {rank} cannot follow: {answer['reasons'][str(rank)]}")
    return 1 if answer["missing"] or not answer["ranks"] else 0
