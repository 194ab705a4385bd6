"""The role of this process in a job whose processes do different work."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Final

_LONGEST: Final = 80


def process_role() -> str | None:
    """What the job calls the work of this process; None if it does not say.

    The variable ``DDLTRACE_ROLE``, else the class of the Ray actor that this process is, else the
    role that TorchElastic gave it.
    """
    elastic = os.environ.get("ROLE_NAME") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if elastic == "default":  # torchrun's, unless it is told another one
        elastic = None
    role = os.environ.get("DDLTRACE_ROLE") or _ray_actor_class() or elastic
    return role[:_LONGEST] if role else None


def _ray_actor_class() -> str | None:
    """The class of the actor that a worker of Ray runs, if the job has imported Ray."""
    ray: Any = sys.modules.get("ray._private.worker")
    # Ray's public context gives the name of one actor, not its class.
    with contextlib.suppress(Exception):
        worker = ray.global_worker
        return type(worker.actors[worker.actor_id]).__name__
    return None
