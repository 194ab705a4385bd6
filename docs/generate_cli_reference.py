"""Writes `docs/cli-reference.md` from the commands themselves: `python3 dev.py docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ddltrace.cli import cli

PAGE = Path(__file__).with_name("cli-reference.md")
WIDTH = 90

INTRODUCTION = """\
# Command line reference

Written by `python3 dev.py docs` from the commands' own help; a test fails when the two differ.

Data goes to stdout, progress to stderr. Exit status: 0 good, 1 an error, 2 wrong usage,
3 a threshold of `--fail-on` was missed; `ddltrace run` returns the job's own status
(128 + n when signal n killed it), or 1 if nothing could be recorded.
"""


def contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """The command's context and those of all its subcommands, depth first."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from contexts(child, command_context(child, name, context))


def command_context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    """The context in which a command would show its help, at a fixed width."""
    return command.context_class(
        command,
        info_name=name,
        parent=parent,
        terminal_width=WIDTH,
        **command.context_settings,
    )


def all_contexts() -> Iterator[click.Context]:
    """The contexts of `ddltrace` and all its commands."""
    return contexts(cli, command_context(cli, "ddltrace"))


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    for context in all_contexts():
        parts.append(f"## `{context.command_path}`\n")
        parts.append(f"```text\n{context.command.get_help(context)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
