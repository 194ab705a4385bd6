"""Serves the dashboard beside a job, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import DdltraceError

_LAST_LOOK_S: Final = 2.5
"""How long the server stays after the job, so that open pages show how the job ended."""

_PATIENCE_S: Final = 5.0


@contextlib.contextmanager
def dashboard_beside(directory: Path) -> Iterator[None]:
    """Serves the dashboard of a trace directory for the duration of the context.

    The server has a low priority. It prints its address to this process's standard error, and ends
    when its standard input is closed, so that it does not outlive a launcher that is killed.

    Args:
        directory: The trace directory; it must exist.

    Raises:
        DdltraceError: The server cannot be started.
    """
    command = [sys.executable, "-m", "ddltrace", "dashboard", str(directory), "--beside-job"]
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            # Ctrl-C is for the job; the server ends after it.
            start_new_session=True,
        )
    except OSError as error:
        raise DdltraceError(f"the dashboard cannot be started: {error}") from error
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
