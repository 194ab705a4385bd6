"""Ends a job that cannot run as it was started: one line, and an error status."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist

_KEY: Final = "ddltrace/refused"
_PATIENCE: Final = timedelta(seconds=5)
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
    """Prints a line, on one rank if several end for the same reason, and ends this process.

    Args:
        line: Why the job cannot run as it was started.
        reason: `StrategyRefusedError.reason`; by default the line.

    Raises:
        StrategyRefusedError: Always.
    """
    print_once(line)
    raise StrategyRefusedError(line if reason is None else reason)


def print_once(line: str) -> None:
    """Prints the line with which a job ends: on rank 0, or here if rank 0 does not end.

    A launcher ends all ranks when the first one fails, so the line must be printed first.
    """
    _refused.append(line)
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            if dist.get_rank() != 0:
                store.wait([_KEY], _PATIENCE)
                return
            print(f"ddltrace: {line}", file=sys.stderr, flush=True)
            store.set(_KEY, "1")
            return
    print(f"ddltrace: {line}", file=sys.stderr, flush=True)
