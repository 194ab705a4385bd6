"""What a strategy does when the job ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddltrace.experiments.engine.refusal import StrategyRefusedError, exit_with_error, has_refused


def at_job_end(settle: Callable[[], None], check: Callable[[], None]) -> None:
    """Registers what to do at the end of the job.

    Args:
        settle: Waits for what is in flight: before any process group is destroyed, and at exit.
            Other ranks may still wait for messages that this rank has not started.
        check: Called then if the whole job ends, unless it has been refused; may refuse it.
    """
    destroy = dist.destroy_process_group

    def check_unless_refused() -> None:
        if not has_refused():
            check()

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        settle()
        if kwargs.get("group", args[0] if args else None) in (None, dist.group.WORLD):
            check_unless_refused()
        return destroy(*args, **kwargs)

    def at_exit() -> None:
        # After an error, these waits would never end.
        if getattr(sys, "last_value", None) is not None:
            return
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                settle()
        try:
            check_unless_refused()
        except StrategyRefusedError:
            # Python ignores what functions at its end raise: the status would be 0.
            exit_with_error()

    dist.destroy_process_group = destroy_process_group
    atexit.register(at_exit)
