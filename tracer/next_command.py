"""Prints the command that a user would run next."""

from __future__ import annotations

import shlex

import click


def print_next_command(*arguments: object) -> None:
    """Prints a command of ddltrace on standard error, quoted for a shell.

    Args:
        arguments: What follows ``ddltrace``, such as ``"analyze"`` and a path.
    """
    command = shlex.join(["ddltrace", *map(str, arguments)])
    click.echo(f"ddltrace: next: {command}", err=True)
