"""Runs a command of ddltrace beside a job: the dashboard, or the one that watches the job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from ddltrace.tracer.errors import DdltraceError

_LAST_LOOK_S: Final = 2.5
"""How long the command stays after the job, so that it shows how the job ended."""

_PATIENCE_S: Final = 5.0


@contextlib.contextmanager
def beside_job(*arguments: str) -> Iterator[None]:
    """Runs a command of ddltrace for the duration of the context.

    It prints to this process's standard error, and ends when its standard input is closed, so that
    it does not outlive a launcher that is killed.

    Args:
        arguments: What follows ``ddltrace``; the command has the option ``--beside-job``.

    Raises:
        DdltraceError: It cannot be started.
    """
    command = [sys.executable, "-m", "ddltrace", *arguments, "--beside-job"]
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            # Ctrl-C is for the job; the server ends after it.
            start_new_session=True,
        )
    except OSError as error:
        raise DdltraceError(f"ddltrace {arguments[0]} cannot be started: {error}") from error
    try:
        yield
        if server.poll() is None:
            time.sleep(_LAST_LOOK_S)
    finally:
        if server.stdin is not None:
            server.stdin.close()
        try:
            server.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
