"""Writes all events when the job destroys its default process group.

A job usually destroys the group after training, and some launchers then end the process without
running its exit handlers (Ray Train kills its workers). Events that wait for the writer's next
interval would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_LIMIT_S: Final = 1.0
"""Longest time that the job waits for the write: a disk that hangs must not stop it."""


def install(context: PatchContext) -> None:
    """Patches ``torch.distributed.destroy_process_group``.

    Args:
        context: The parts of the recording rank.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d

    dist: Any = torch.distributed
    defining_module: Any = distributed_c10d
    destroy = _followed_by_write(context, dist.destroy_process_group, dist.is_initialized)
    dist.destroy_process_group = defining_module.destroy_process_group = destroy


def _followed_by_write(
    context: PatchContext, original: Callable[..., None], group_exists: Callable[[], bool]
) -> Callable[..., None]:
    """Wraps the function so that all events are written once no default group is left."""

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        try:
            if context.native is not None:
                context.native.forget_groups()
            if not group_exists():
                context.write_now(_LIMIT_S)
                context.record.note_flushed()
                context.write_now(_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("destroy_process_group", error)

    return destroy_process_group
