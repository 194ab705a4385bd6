"""The commands for a job that runs: ``on``, ``off``, ``level`` and ``attach``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ddltrace.tracer.config import LEVELS
from ddltrace.tracer.connections.requests import NAME, PREFIX, ask
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.next_command import print_next_command
from ddltrace.tracer.trace.liveness import takes_orders

_TIMEOUT_S = 30.0

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
    answer = _order(target, order)
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
    answer = _order(target, {"action": "off", "ranks": _rank_list(ranks)})
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
    answer = _order(target, order)
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
    if next(_sockets_of_process(pid), None) is not None:
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
            click.echo(f"{done}: ranks {_listed(answer['ranks'])}")
        for rank in answer["missing"]:
            click.echo(f"rank {rank} cannot follow: {answer['reasons'][str(rank)]}")
    return 1 if answer["missing"] or not answer["ranks"] else 0


def _listed(ranks: list[int]) -> str:
    """Ranks as ranges, such as ``0-3,7``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _order(target: str, order: dict[str, Any]) -> dict[str, Any]:
    """Gives an order to the job, through the first of its ranks that answers.

    Raises:
        UsageError: The target is no running job of this user on this host.
        DdltraceError: No rank carried it out.
    """
    paths = list(_sockets_of(target))
    if not paths:
        raise UsageError(
            f"{target}: no rank of a running job was found here that takes orders (is the job on "
            "another host, of another user, or has it not joined its process group yet?)"
        )
    failure: OSError | None = None
    for path in paths:
        try:
            answer = ask(path, {"do": "order", **order}, _TIMEOUT_S)
        except OSError as error:
            failure = error
            continue
        if "error" in answer:
            raise DdltraceError(f"{target}: {str(answer['error'])[:200]}")
        return answer
    raise DdltraceError(f"{target}: no rank answers: {failure}")


def _sockets_of(target: str) -> Iterator[str]:
    if target.isdigit() and not Path(target).exists():
        yield from _sockets_of_process(int(target))
    else:
        yield from _sockets_of_trace(Path(target))


def _sockets_of_trace(directory: Path) -> Iterator[str]:
    """The sockets of the ranks of this host that record into a directory or its parts."""
    from ddltrace.tracer.trace.run_files import read_run_file, read_sidecars
    from ddltrace.tracer.trace.trace_files import parts_of

    read_run_file(directory)
    for folder in (directory, *parts_of(directory)):
        infos = sorted(read_sidecars(folder, []), key=lambda info: (-info.attempt, info.rank))
        for info in infos:
            if takes_orders(info):
                yield info.control


def _sockets_of_process(pid: int) -> Iterator[str]:
    """The sockets of a process and of the processes below it."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error as error:
        raise UsageError(f"process {pid} cannot be looked at: {error}") from error
    for member in family:
        try:
            connections = member.net_connections(kind="unix")
        except psutil.Error:
            continue  # it has ended, or belongs to another user
        for connection in connections:
            path = Path(str(connection.laddr))
            if path.name == NAME and path.parent.name.startswith(f"{PREFIX}{member.pid}-"):
                yield str(path)
