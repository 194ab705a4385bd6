"""The commands for a job that runs: ``on``, ``off``, ``level`` and ``attach``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from ddltrace.tracer.config import LEVELS
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.switch_orders import give_order, ranges_text, sockets_of_process

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
Example:
  ddltrace attach 12345"""
)
@click.argument("pid", type=click.IntRange(min=1))
def attach(pid: int) -> int:
    """Check whether a running process can be recorded.

    A job that was started by ddltrace run, or that has called ddltrace.arm, can be recorded at any
    time: see ddltrace on. Others cannot.
    """
    if next(sockets_of_process(pid), None) is not None:
        click.echo(f"process {pid} is armed")
        print_next_command("on", pid, "--steps", 50)
        return 0
    raise UsageError(
        f"process {pid} was started without ddltrace and cannot be recorded: start the job with "
        "ddltrace run --off -- COMMAND, which records nothing until ddltrace on"
    )


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
