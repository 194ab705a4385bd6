"""Ends a job that cannot run as it was started: one line, and an error status."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist

_KEY: Final = "ddltrace/refused"
_PATIENCE: Final = timedelta(seconds=5)


class StrategyRefusedError(SystemExit):
    """The job cannot run with this strategy; its exit status is 1.

    It is a `SystemExit`, because the reason has been printed, and exception handlers of the job
    must not continue without the strategy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(1)
        self.reason = reason


def refuse(spec: str, reason: str) -> NoReturn:
    """Prints on rank 0 why a strategy cannot be applied, and ends this process.

    Args:
        spec: The strategy.
        reason: The reason and the fix.

    Raises:
        StrategyRefusedError: Always.
    """
    end_job(f"strategy {spec} cannot be applied: {reason}", reason)


def end_job(line: str, reason: str | None = None) -> NoReturn:
    """Prints a line on rank 0, and ends this process.

    Args:
        line: Why the job cannot run as it was started.
        reason: `StrategyRefusedError.reason`; by default the line.

    Raises:
        StrategyRefusedError: Always.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized or dist.get_rank() == 0:
        print(f"ddltrace: {line}", file=sys.stderr, flush=True)
    # A launcher ends all ranks when the first one fails, so rank 0 must print first.
    if initialized:
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            if dist.get_rank() == 0:
                store.set(_KEY, "1")
            else:
                store.wait([_KEY], _PATIENCE)
    raise StrategyRefusedError(line if reason is None else reason)
