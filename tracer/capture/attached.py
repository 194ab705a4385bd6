"""Arms a process of a running job from outside; called by the script that `attach` delivers."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ddltrace.tracer.capture.inject import arm
from ddltrace.tracer.config import CaptureConfig


def arm_attached(directory: str, reports_directory: str, version: str) -> dict[str, Any]:
    """Arms this process, on its main thread.

    Args:
        directory: The trace directory, an absolute path.
        reports_directory: Where a failure is reported if not in the trace directory.
        version: The version of ddltrace that attaches.

    Returns:
        `rank` and `world_size`, which are None if the process has not joined a process group; or
        `error`.
    """
    own = metadata.version("ddltrace")
    if own != version:
        return {"error": f"its ddltrace is {own}, this one is {version}"}
    config = CaptureConfig.in_code(Path(directory), "layer")
    assert config is not None
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        join = getattr(c10d, "init_process_group", None)
        if join is None:
            return {"error": "it is importing PyTorch just now: try again"}
        if hasattr(join, "_ddltrace_original"):
            return {"error": "it was armed before"}
    arm(replace(config, off=True, attached=True, reports_directory=reports_directory))
    if c10d is None or not c10d.is_initialized():
        return {"rank": None, "world_size": None}
    return _started(Path(directory), Path(reports_directory))


def _started(*report_directories: Path) -> dict[str, Any]:
    from ddltrace.tracer.capture.session import current_session

    session = current_session()
    if session is None:
        for directory in report_directories:
            report = directory / f"untraced-{os.getpid()}.txt"
            if report.exists():
                return {"error": report.read_text(encoding="utf-8", errors="replace")}
        return {"error": "the tracer did not start"}
    info = session.context.record.info
    if not info.control:
        return {"error": "it has no place for a socket on which it would take orders"}
    return {"rank": info.rank, "world_size": info.world_size}
