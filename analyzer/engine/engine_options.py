"""The options of commands that choose an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ddltrace.analyzer.engine.engine import Engine
from ddltrace.tracer.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])


def engine_options(command: Command) -> Command:
    """Adds the options ``--engine`` and ``--scheduler`` to a command."""
    engine = click.option(
        "--engine",
        type=click.Choice(["embedded", "dask"]),
        default="embedded",
        show_default=True,
        help="What executes the work; the result is the same. embedded: this machine, without "
        "further packages. dask: processes of a Dask cluster, on this machine unless --scheduler "
        "names another one.",
    )
    scheduler = click.option(
        "--scheduler",
        metavar="ADDRESS",
        help="Scheduler of a running Dask cluster, such as tcp://head:8786. Its workers need the "
        "same version of ddltrace, and the files at the same path.",
    )
    return engine(scheduler(command))


@contextmanager
def chosen_engine(engine: str, scheduler: str | None) -> Iterator[Engine | None]:
    """Opens the engine that the options choose, for the time of a `with` block.

    Yields:
        The engine; None for the embedded one.

    Raises:
        UsageError: ``--scheduler`` without ``--engine dask``.
        EngineError: The cluster cannot be used.
    """
    if engine == "embedded":
        if scheduler is not None:
            raise UsageError("--scheduler is the scheduler of a Dask cluster: add --engine dask")
        yield None
        return
    from ddltrace.analyzer.engine.dask_engine import open_dask

    with open_dask(scheduler) as opened:
        place = "a local Dask cluster" if scheduler is None else f"the Dask cluster of {scheduler}"
        click.echo(f"ddltrace: {place} with {opened.workers} threads", err=True)
        yield opened
