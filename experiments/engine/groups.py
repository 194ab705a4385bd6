"""Further process groups of the same ranks."""

from __future__ import annotations

import torch.distributed as dist


def new_group_like(group: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
    """A further group of the same ranks; only these ranks call this.

    Args:
        group: The group.
        backend: Of the new group; by default that of the group.
    """
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=backend or dist.get_backend(group),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
