"""Extracts the command of one rank from a command that starts ranks with torchrun."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import UsageError

_WORDS: Final = 6
"""Words at the start of a command among which a launcher is looked for: ``env``, ``nice`` and the
like may stand before it."""

_TORCHRUN: Final = re.compile(r"(^|/)torchrun$|^torch\.distributed\.run$")
_OTHER_LAUNCHERS: Final = re.compile(
    r"(^|/)(accelerate|deepspeed|horovodrun|mpirun|mpiexec)$|^torch\.distributed\.launch$"
)


def command_of_each_rank(command: Sequence[str], *, hosts: int, ranks_per_host: int) -> list[str]:
    """The command that is started for each rank on emulated hosts.

    The hosts start the ranks themselves, with the environment that torchrun would give them. Of a
    torchrun command, the script and its arguments remain.

    Args:
        command: A user's command.
        hosts: Number of hosts.
        ranks_per_host: Ranks on each of them.

    Raises:
        UsageError: The command is that of another launcher, or its number of ranks does not fit
            the hosts.
    """
    for place, word in enumerate(command[:_WORDS]):
        if _OTHER_LAUNCHERS.search(word):
            raise UsageError(
                f"--hosts starts the ranks on each host itself: give it the script, as in "
                f"-- python train.py, in place of {word:.80}"
            )
        if _TORCHRUN.search(word):
            interpreter = _interpreter(command[: place + 1])
            return [*interpreter, *_script(command[place + 1 :], hosts, ranks_per_host)]
    return list(command)


def _interpreter(launcher: Sequence[str]) -> list[str]:
    """What stands before the script: the same Python as torchrun's."""
    if len(launcher) > 1 and launcher[-2] == "-m":
        return list(launcher[:-2])
    program = Path(shutil.which(launcher[-1]) or launcher[-1])
    beside = program.with_name("python")
    return [*launcher[:-1], str(beside) if beside.exists() else sys.executable]


def _script(arguments: Sequence[str], hosts: int, ranks_per_host: int) -> list[str]:
    """The script, or ``-m MODULE``, with its own arguments.

    Args:
        arguments: What follows torchrun.
        hosts: Number of hosts.
        ranks_per_host: Ranks on each of them.
    """
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = parser.parse_args(list(arguments))
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1:] or ["it has no script"]
        raise UsageError(f"the torchrun command cannot be read: {last[0]:.200}") from None
    if options.no_python:
        raise UsageError("--hosts cannot run torchrun --no-python: give the program itself")
    asked = str(options.nproc_per_node)
    if asked.isdigit() and int(asked) not in (1, ranks_per_host, hosts * ranks_per_host):
        raise UsageError(
            f"torchrun --nproc-per-node {asked} does not fit {hosts} hosts with {ranks_per_host} "
            f"rank{'' if ranks_per_host == 1 else 's'} each; see --ranks-per-host"
        )
    module = ["-m"] if options.module else []
    return ["-u", *module, options.training_script, *options.training_script_args]
