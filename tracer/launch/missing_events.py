"""Finds the likely reason why a job recorded no events, and the fix."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_IN_CODE: Final = "add `import ddltrace.tracer; ddltrace.tracer.install()` to the top of the script"
_CLEANERS: Final = {
    "sudo": "sudo clears the environment: use `sudo -E`, or run sudo ddltrace run -- COMMAND",
    "su": "su may clear the environment: start ddltrace run inside su",
    "ssh": "ssh does not pass the environment on: start ddltrace run on the other host",
    "docker": "a container has its own environment: start ddltrace run inside it",
    "podman": "a container has its own environment: start ddltrace run inside it",
    "kubectl": "a pod has its own environment: start ddltrace run inside it",
    "singularity": "a container may clear the environment: start ddltrace run inside it",
    "apptainer": "a container may clear the environment: start ddltrace run inside it",
}


def explain_nothing_recorded(command: Sequence[str], words: Sequence[str]) -> str:
    """Explains to the user why the job recorded no events.

    Args:
        command: The job's command line.
        words: Messages that processes of the job wrote when they could not record.
    """
    reasons = [*words[:2], *_seen_in_command(command)]
    if reasons:
        return "; ".join(dict.fromkeys(reasons))
    if importlib.util.find_spec("torch") is None:
        return (
            f"PyTorch is not installed for {sys.executable}. If the job runs under another "
            "Python, check it with ddltrace doctor --python PYTHON"
        )
    return (
        "no process called torch.distributed.init_process_group. Possible causes: the job is not "
        "distributed, or it failed earlier; a parent process started Python with -I or -E or "
        f"cleared the environment (fix: {_IN_CODE}); the job's Python is not {sys.executable} "
        "(check it with ddltrace doctor --python PYTHON)"
    )


def _seen_in_command(command: Sequence[str]) -> Iterator[str]:
    names = [Path(word).name for word in command]
    for number, name in enumerate(names):
        if name.startswith("python"):
            yield from _isolating_flags(command[number + 1 :], "Python was started with")
            break
    if not names:
        return
    if names[0] == "env" and {"-", "-i", "--ignore-environment"} & set(command[1:]):
        yield "env -i clears the environment: use env -i ... ddltrace run -- COMMAND"
    if names[0] in _CLEANERS:
        yield _CLEANERS[names[0]]
    yield from _isolating_flags(_shebang(command[0]), f"{command[0]} starts Python with")


def _isolating_flags(arguments: Sequence[str], how: str) -> Iterator[str]:
    """Finds flags before the script that make Python ignore PYTHONPATH or skip `site`."""
    for word in arguments:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            return
        for flag in "IES":
            if not word.startswith("--") and flag in word:
                yield f"{how} -{flag}, which keeps the tracer out: remove the flag, or {_IN_CODE}"
                return


def _shebang(script: str) -> list[str]:
    try:
        with open(script, "rb") as file:
            line = file.readline(256)
    except OSError:
        return []
    words = line.decode("utf-8", "replace").split()
    return words[1:] if line.startswith(b"#!") and "python" in words[0] else []
