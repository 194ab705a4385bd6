"""Records jobs: the launcher, the tracer inside each rank, and the trace files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

__all__ = ["install"]


def install(
    directory: str | PathLike[str] | None = None, *, level: str = "layer", off: bool = False
) -> bool:
    """Records this process once it joins a process group: `ddltrace run` from code.

    Call it in every rank, before or after ``torch.distributed.init_process_group``; messages sent
    before the call are not recorded. Under ``ddltrace run`` the arguments have no effect. Without
    a launcher, each rank writes its part into the directory when it ends, and ``ddltrace analyze
    DIRECTORY`` combines the parts. A process that joins no process group records nothing. A
    second run of the job into the same directory is read as a restart of the first.

    Args:
        directory: The trace directory, the same for all ranks of a host; created if it is
            missing. By default the value of the environment variable ``DDLTRACE_OUTPUT``.
        level: ``comm`` or ``layer``, as for ``ddltrace run``. The environment variable
            ``DDLTRACE_LEVEL`` overrides it.
        off: Whether to record nothing until ``ddltrace on DIRECTORY`` is called. The environment
            variable ``DDLTRACE_OFF`` overrides it.

    Returns:
        Whether the process will be recorded; False if no directory is given.

    Raises:
        ddltrace.tracer.errors.UsageError: The level does not exist, or the directory holds
            other files.
    """
    from ddltrace.tracer.capture.inject import arm
    from ddltrace.tracer.config import CaptureConfig

    config = CaptureConfig.from_environment() or CaptureConfig.in_code(
        None if directory is None else Path(directory), level, off=off
    )
    if config is None:
        return False
    arm(config)
    return True
