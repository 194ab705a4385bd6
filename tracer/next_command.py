"""Messages on standard error, among them the command that a user would run next."""

from __future__ import annotations

import os
import shlex
import sys

import click


def say(text: str) -> None:
    """Prints a line on standard error; if it cannot be written, it is lost, and so are later ones.

    The terminal may be closed, or the reader of the pipe gone: that must not end a command that
    runs a job, or change its status.
    """
    try:
        click.echo(f"ddltrace: {text}", err=True)
    except OSError:
        # Python writes again what it could not write, at the end, and would then exit with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_next_command(*arguments: object) -> None:
    """Prints a command of ddltrace on standard error, quoted for a shell.

    Args:
        arguments: What follows ``ddltrace``, such as ``"analyze"`` and a path.
    """
    command = shlex.join(["ddltrace", *map(str, arguments)])
    say(f"next: {command}")
