"""Frameworks that take over the communication of a job, by the modules that the job has loaded."""

from __future__ import annotations

import sys


def framework_versions() -> dict[str, str]:
    """Returns name -> version of the frameworks that carry this process's gradients.

    DeepSpeed counts once its communication is initialized: libraries import it without using it.
    """
    communication = sys.modules.get("deepspeed.comm.comm")
    if getattr(communication, "cdb", None) is None:
        return {}
    return {"deepspeed": str(getattr(sys.modules.get("deepspeed"), "__version__", ""))}
