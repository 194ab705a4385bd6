"""Capture: what runs beside and inside the job, and the trace on disk."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

__all__ = ["install"]


def install(directory: str | PathLike[str] | None = None, *, level: str = "layer") -> bool:
    """Makes this process record itself once it joins a process group: `ddltrace run` in code.

    Call it before or after ``torch.distributed.init_process_group``, in every rank; what was
    communicated before the call is not recorded. Below ``ddltrace run`` the trace goes where
    that says, and the arguments have no effect. Without it, each rank leaves its part in the
    directory when it ends, and ``ddltrace analyze DIRECTORY`` puts them together. A process
    that joins no process group records nothing. A job run again into the same directory is
    read as a restart of the first.

    Args:
        directory: The trace directory, the same for all ranks of a host; made if it is
            missing. By default the environment variable ``DDLTRACE_OUTPUT``.
        level: ``comm`` or ``layer``, as for ``ddltrace run``; by default ``DDLTRACE_LEVEL`` if
            that is set.

    Returns:
        Whether the process will be recorded: false if nobody said where to.

    Raises:
        ddltrace.tracer.errors.UsageError: There is no such level, or a directory is named
            that holds something else than a trace.
    """
    from ddltrace.tracer.capture.inject import arm
    from ddltrace.tracer.config import CaptureConfig

    config = CaptureConfig.from_environment() or CaptureConfig.in_code(
        None if directory is None else Path(directory), level
    )
    if config is None:
        return False
    arm(config)
    return True
