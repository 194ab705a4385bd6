"""Ends a job that cannot run as it was started: one line, and an error status."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist

from ddltrace.experiments.messages.trace_marks import current_session

_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.01
_refused: Final[list[str]] = []


def has_refused() -> bool:
    """Whether this process has already been told to end."""
    return bool(_refused)


class StrategyRefusedError(SystemExit):
    """The job cannot run with this strategy; its exit status is 1.

    It is a `SystemExit`, because the reason has been printed, and exception handlers of the job
    must not continue without the strategy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(1)
        self.reason = reason


def refuse(spec: str, reason: str) -> NoReturn:
    """Prints why a strategy cannot be applied, and ends this process.

    Args:
        spec: The strategy.
        reason: The reason and the fix.

    Raises:
        StrategyRefusedError: Always.
    """
    end_job(f"strategy {spec} cannot be applied: {reason}", reason)


def end_job(line: str, reason: str | None = None) -> NoReturn:
    """Prints a line, on one rank of the job, and ends this process.

    Args:
        line: Why the job cannot run as it was started.
        reason: `StrategyRefusedError.reason`; by default the line.

    Raises:
        StrategyRefusedError: Always.
    """
    print_once(line)
    if threading.current_thread() is not threading.main_thread():
        # The exception would end the thread only, such as one that runs a remote call.
        exit_with_error()
    raise StrategyRefusedError(line if reason is None else reason)


def exit_with_error() -> NoReturn:
    """Ends this process with status 1 where an exception would not end it."""
    session = current_session()
    if session is not None:
        session.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def print_once(line: str) -> None:
    """Prints the line with which a job ends, on the first of its ranks that ends.

    The others wait until it is printed: a launcher ends all ranks when one of them ends. Ranks of
    one trace directory agree by a file in it, which outlives the job's store, ranks of several
    hosts by the store.
    """
    _refused.append(line)
    # A process that has caught the exception may end once more, for another reason.
    name = f"refused-{len(_refused)}"
    session = current_session()
    marker = None if session is None else session.config.directory / f"{name}.txt"
    if marker is not None:
        try:
            marker.open("x").close()
        except FileExistsError:
            until = time.monotonic() + _PATIENCE_S
            while not marker.stat().st_size and time.monotonic() < until:
                time.sleep(_PAUSE_S)
            return
        except OSError:
            marker = None
    key = f"ddltrace/{name}"
    store, claimed = None, True
    with contextlib.suppress(Exception):  # no process group, or its store has ended
        store = dist.distributed_c10d._get_default_store()
        claimed = store.add(key, 1) == 1
    if claimed:
        print(f"ddltrace: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        if store is not None and claimed:
            store.set(f"{key}/printed", "1")
        elif store is not None:
            store.wait([f"{key}/printed"], timedelta(seconds=_PATIENCE_S))
    if marker is not None:
        with contextlib.suppress(OSError):
            marker.write_text(line + "\n")
