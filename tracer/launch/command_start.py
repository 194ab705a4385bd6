"""Explains why a command cannot be started, and names the command that would start."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path


def explain_no_start(command: Sequence[str], error: OSError) -> str:
    """Returns one line with the reason and, as far as it can be seen, the fix.

    Args:
        command: The job's command line.
        error: What the system answered to it.
    """
    return next(_reasons(command, error))


def _reasons(command: Sequence[str], error: OSError) -> Iterator[str]:
    """The reasons that hold, the most specific one first; the last one always does."""
    first, *others = command
    path = Path(first)
    is_missing = error.errno == errno.ENOENT
    if first in ("-m", "-c") and others:
        yield f"{first} is an option of Python: {_run('python', *command)}"
    if path.is_dir():
        can_run = (path / "__main__.py").is_file()
        fix = _run("python", *command) if can_run else "name a command"
        yield f"{first} is a folder, not a command: {fix}"
    if is_missing and len(words := _words(first)) > 1:
        yield f"command not found: {first!r}; without the quotes: {_run(*words, *others)}"
    if path.suffix in (".py", ".pyz") and path.is_file():
        fix = f"{_run('python', *command)} (or with torchrun in place of python)"
        yield f"{first} is a Python script, not a command: {fix}"
    if path.suffix in (".py", ".pyz"):
        yield f"command not found: {first}, and there is no such file here"
    if is_missing and path.is_file() and os.sep in first:
        yield f"{first} cannot be run: its first line names a program that is not there"
    if is_missing:
        yield f"command not found: {first}"
    if error.errno == errno.EACCES and path.is_file():
        yield f"{first} is not executable: chmod +x {shlex.quote(first)}"
    if error.errno == errno.ENOEXEC:
        yield f"{first} has no first line that names its program, as in: {_run('bash', *command)}"
    yield f"{first} cannot be run: {error.strerror}"


def _words(text: str) -> list[str]:
    """The words of a text that may be a quoted command line."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _run(*command: str) -> str:
    return f"ddltrace run -- {shlex.join(command)}"
