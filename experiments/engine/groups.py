"""Further process groups of the same ranks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import torch.distributed as dist

_made: Final[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()  # a job ends them itself
_numbers: Final[dict[str, Iterator[int]]] = defaultdict(lambda: itertools.count(1))


def new_group_like(
    group: dist.ProcessGroup, purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A further group of the same ranks; only these ranks call this, all in the same order.

    Args:
        purpose: What the new group is for; the trace shows its messages on a lane of this name.
        backend: Backend of the new group; by default that of `group`.
    """
    ranks = dist.get_process_group_ranks(group)
    whole = len(ranks) == dist.get_world_size()
    name = purpose if whole else f"{purpose} of {','.join(map(str, ranks))}"
    number = next(_numbers[name])
    made = dist.new_group(
        ranks,
        backend=backend or dist.get_backend(group),
        use_local_synchronization=not whole,
        group_desc=f"ddltrace:{name}" + (f" {number}" if number > 1 else ""),
    )
    assert isinstance(made, dist.ProcessGroup)
    _made.add(made)
    return made


def destroy_groups() -> None:
    """Ends the groups that were made, whose threads else go on until the job ends its groups."""
    while _made:
        dist.destroy_process_group(_made.pop())
    gc.collect()  # what has used them may refer to itself
