"""Writes `docs/cli-reference.md` from the commands themselves: `python3 dev.py docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ddltrace.cli import cli
from ddltrace.tracer.optional_packages import EXTRAS, NOT_IN_ALL, USES

PAGE = Path(__file__).with_name("cli-reference.md")
WIDTH = 90

INTRODUCTION = """\
# Command line reference

Written by `python3 dev.py docs` from the commands' own help; a test fails when the two differ.

Data goes to stdout, progress to stderr. Exit status: 0 good, 1 an error, 2 wrong usage,
3 a threshold of `--fail-on` was missed; `ddltrace run` returns the job's own status
(128 + n when signal n killed it), or 1 if nothing could be recorded.
"""


VARIABLES = {
    "DDLTRACE_LEVEL": "`--level` of `ddltrace run`; also the level of `ddltrace.tracer.install`",
    "DDLTRACE_OFF": "`1`: as `--off` of `ddltrace run`; also for `ddltrace.tracer.install`",
    "DDLTRACE_METRICS_TOKEN": "what requests to the endpoint of `--metrics` have to contain; "
    "needed to listen on other addresses than 127.0.0.1",
    "DDLTRACE_ALERT": "set for the command of `ddltrace watch --alert-command`: the alert",
    "DDLTRACE_COUNTERS": "`0`: as `--no-counters` of `ddltrace run`",
    "DDLTRACE_OUTPUT": "the trace directory of `ddltrace.tracer.install` if it is given none",
    "DDLTRACE_NATIVE": "`0`: record in Python alone, without the compiled library",
    "DDLTRACE_ROLE": "what a process of a job with several roles does, such as `trainer` "
    "([clusters.md](clusters.md)); read when the process joins its process group",
    "DDLTRACE_UPLOAD_WAIT": "seconds without progress after which `ddltrace run` and `ddltrace "
    "upload` give up an upload; 60 by default",
    "DDLTRACE_IMPORT_MEMORY": "memory for one imported file, such as `4GiB`, in all commands",
    "DDLTRACE_COMMUNICATION_KERNELS": "`--communication-kernels`, in all commands",
    "DDLTRACE_NCCL": "`1`: as `--nccl` of `ddltrace run`",
    "DDLTRACE_NCCL_DIR": "where NCCL's profiler plugin writes a ring for each process "
    "([nccl.md](nccl.md)); set by `ddltrace run --nccl`. `DDLTRACE_NCCL_RECORDS` is their size",
    "DDLTRACE_NCCL_EVENTS": "the kinds of events that the plugin records; set by `ddltrace run "
    "--nccl-events`",
    "DDLTRACE_DEBUG": "any value: an internal error is shown with its traceback",
    "DDLTRACE_CONFIG": "set by `ddltrace run` for the processes of the job; hand it on, with "
    "`PYTHONPATH`, to ranks that a scheduler starts elsewhere ([clusters.md](clusters.md))",
    "DDLTRACE_EXPERIMENT_OBSERVE": "set by `ddltrace experiment` for the processes of its jobs",
    "DDLTRACE_PROTOCOL": "set by `ddltrace experiment` for the processes of its jobs",
    "DDLTRACE_TECHNIQUES": "set by `ddltrace run` for its processes: plug-ins to load",
}
"""The variables of the environment that ddltrace reads under names of its own."""

OTHERS = """\
It also reads `XDG_CACHE_HOME` (where the compiled library and the dashboard's caches lie;
`~/.cache/ddltrace` by default), the variables of launchers (`RANK`, `LOCAL_RANK`, `MASTER_ADDR`,
`TORCHELASTIC_RESTART_COUNT`, those of Slurm and of `torchrun`), those of stores (such as
`AWS_ENDPOINT_URL`), and, with `analyze --to`, those of the tracker (`MLFLOW_TRACKING_URI`,
`WANDB_MODE`, ...).
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
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    parts.append("# Environment variables\n")
    parts.append("| variable | effect |\n|---|---|\n" + "\n".join(rows) + "\n")
    parts += [OTHERS, "# Extras\n"]
    rows = [
        f"| `{extra}` | {USES[extra]} | {', '.join(f'`{name}`' for name in packages)} "
        f"| {'no' if extra in NOT_IN_ALL else 'yes'} |"
        for extra, packages in EXTRAS.items()
    ]
    head = "| extra | for | installs | part of `all` |\n|---|---|---|---|\n"
    parts.append("`pip install 'ddltrace[EXTRA]'` adds what a command needs besides the core.\n")
    parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
