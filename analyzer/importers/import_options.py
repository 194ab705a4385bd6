"""The option of commands that read other tools' files: which kernels communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ddltrace.tracer.trace.communication_kernels import ENVIRONMENT, also_known

Command = TypeVar("Command", bound=Callable[..., Any])


def communication_kernels_option(command: Command) -> Command:
    """Adds the option ``--communication-kernels`` to a command, which it concerns as a whole."""

    def add(context: click.Context, _: click.Parameter, pattern: str | None) -> None:
        context.with_resource(also_known(pattern))

    return click.option(
        "--communication-kernels",
        metavar="REGEX",
        expose_value=False,
        callback=add,
        help="In Kineto files, kernels whose name matches are communication, besides those of "
        f"known libraries; default: {ENVIRONMENT}.",
    )(command)
