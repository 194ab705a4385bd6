"""Supports ``torch.utils.swap_tensors``, with which modules convert parameters out of place.

It refuses tensors that have any reference, even a weak one, and the tracer holds such references.
They are released while it runs. Gradient hooks move with the contents; the name stays with the
object.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ddltrace.tracer.interpose.autograd import watch_again

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.patch_context import PatchContext


class _PutAside(NamedTuple):
    """The tracer's record of a tensor.

    Attributes:
        tensor: The tensor.
        number: Its id, if it is a parameter.
        is_shard: Whether it is a shard of a parameter.
        watched: The ids for which C++ watches it.
    """

    tensor: torch.Tensor
    number: int | None
    is_shard: bool
    watched: list[int]


def install(context: PatchContext) -> None:
    """Patches ``torch.utils.swap_tensors``.

    Args:
        context: The parts of the recording rank.
    """
    import torch

    original: Any = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> Any:
        aside: list[_PutAside] = []
        swapped = False
        try:
            aside += [_put_aside(context, tensor) for tensor in (t1, t2)]
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("swap tensors", error)
        try:
            result = original(t1, t2)
            swapped = True
            return result
        finally:
            try:
                _take_back(context, aside, swapped=swapped)
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("swap tensors", error)

    torch.utils.swap_tensors = swap_tensors


def _put_aside(context: PatchContext, tensor: torch.Tensor) -> _PutAside:
    registry = context.registry
    watched = [] if registry.native is None else registry.native.forget(tensor)
    is_shard = registry.is_shard(tensor)
    return _PutAside(tensor, registry.drop_reference(tensor), is_shard, watched)


def _take_back(context: PatchContext, aside: list[_PutAside], *, swapped: bool) -> None:
    registry = context.registry
    both = all(each.number is not None for each in aside)
    for each, other in zip(aside, reversed(aside), strict=True):
        if each.is_shard:
            registry.add_shard(each.tensor)
        # If both have hooks, the names move with them.
        number = other.number if both and swapped else each.number
        if number is None:
            continue
        registry.refer_to(each.tensor, number)
        if swapped and not both:
            watch_again(context, number, each.tensor)
        elif registry.native is not None:
            hooked = other if swapped else each
            registry.native.remember(each.tensor, hooked.watched)
