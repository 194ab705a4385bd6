"""Encoded messages of FSDP2, and when parameters are gathered.

Through the extension points of ``fully_shard``: its custom all-gather and reduce-scatter, and the
lists of modules to prefetch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddltrace.experiments.codecs import Codec, create
from ddltrace.experiments.collectives.over_architecture import find_hosts
from ddltrace.experiments.messages.trace_marks import Coding, calibrating
from ddltrace.tracer.errors import MissingCapabilityError, UsageError

_EXTENSION: Final = "set_custom_reduce_scatter"


Refuse = Callable[[str], NoReturn]
"""Ends the job because of a message that cannot be encoded, with a reason."""


def raise_error(reason: str) -> NoReturn:
    """Raises a `UsageError` with the reason."""
    raise UsageError(reason)


def change_messages(
    root: nn.Module,
    *,
    reduce: str,
    gather: str,
    prefetch: int,
    ranks_per_host: int | None,
    refuse: Refuse,
) -> None:
    """Changes the messages of a sharded model.

    Args:
        root: A module below which `fully_shard` was called, or itself.
        reduce: Codec of gradients, or ``none``.
        gather: Codec of parameters, or ``none``.
        prefetch: How many layers ahead parameters are gathered; 0 leaves that to PyTorch.
        ranks_per_host: As of `find_hosts`, for two levels of `reduce`.
        refuse: Called for a message that cannot be encoded.

    Raises:
        MissingCapabilityError: This version of PyTorch has no custom messages of FSDP.
    """
    encodes = reduce != "none" or gather != "none"
    if encodes and not hasattr(FSDPModule, _EXTENSION):
        raise MissingCapabilityError(
            f"PyTorch {torch.__version__} has no custom messages of fully_shard; update PyTorch, "
            "or leave out reduce= and gather="
        )
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        if reduce != "none":
            module.set_custom_reduce_scatter(_reduce_scatter(reduce, ranks_per_host, refuse))
        if gather != "none":
            module.set_custom_all_gather(_all_gather(gather, refuse))
    if prefetch:
        _prefetch([module for module in modules if module is not root], prefetch)


def _prefetch(modules: Sequence[Any], count: int) -> None:
    """Gathers parameters some modules ahead; modules compute in the order of the model."""
    for place, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(list(modules[place + 1 : place + 1 + count]))
        earlier = modules[max(place - count, 0) : place]
        module.set_modules_to_backward_prefetch(list(reversed(earlier)))


class _OwnBuffers:
    """Gives each message a buffer of its own."""

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


def _reduce_scatter(name: str, ranks_per_host: int | None, refuse: Refuse) -> Any:
    """A reduce-scatter of encoded gradients, for `FSDPModule.set_custom_reduce_scatter`."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    codec = create(name)

    class EncodedReduceScatter(_OwnBuffers, ReduceScatter):
        """An all-to-all of encoded parts, which are added up in float32; or two of them."""

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            """Returns when the sum is in the output, or is enqueued on the stream."""
            del async_op
            ranks = group.size()
            if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                refuse(f"reduce={name} sums gradients, and the job asks for {op}")
            rows = input_tensor.view(ranks, -1)
            levels = _levels_of(group, ranks_per_host)
            if levels is None:
                total = _summed(codec, rows, group)
            else:
                total = _summed(codec, rows[levels.order], levels.inside)
                total = _summed(codec, total, levels.between)
            if op == dist.ReduceOp.AVG:
                total.div_(ranks)
            output_tensor.copy_(total.view(-1))

    return EncodedReduceScatter()


def _summed(codec: Codec, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums rows over ranks, by one all-to-all of encoded rows.

    Args:
        rows: As many for each rank of the group, in the order of ranks.

    Returns:
        The sums of this rank's rows, float32 for 16-bit rows.
    """
    with Coding("encode", rows.nbytes) as coding:
        sent = torch.cat(codec.encode_rows(rows, range(len(rows))))
        coding.bytes_out = sent.nbytes
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    with Coding("decode", received.nbytes) as coding:
        by_sender = received.view(group.size(), len(rows) // group.size(), -1)
        by_row = by_sender.transpose(0, 1).contiguous()
        total = codec.sum_rows(by_row, rows.shape[1], rows.dtype)
        coding.bytes_out = total.nbytes
    return total


@dataclass(frozen=True)
class _Levels:
    """The two levels in which ranks of several hosts sum.

    Attributes:
        order: All ranks of the group, in the order of their places in their hosts.
        inside: This host's ranks.
        between: The ranks of all hosts with this rank's place in its host.
    """

    order: list[int]
    inside: dist.ProcessGroup
    between: dist.ProcessGroup


_levels: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, _Levels | None]] = (
    weakref.WeakKeyDictionary()
)


def _levels_of(group: dist.ProcessGroup, ranks_per_host: int | None) -> _Levels | None:
    """The levels of a group; the first call is collective.

    Args:
        ranks_per_host: As of `find_hosts`; the same in all calls.

    Returns:
        None for one level: on one host, with one rank on each host, or with unequally many.
    """
    if group not in _levels:
        with calibrating("hosts of ranks"):
            hosts = find_hosts(group, ranks_per_host)
        _levels[group] = _make_levels(group, hosts) if _has_two_levels(hosts) else None
    return _levels[group]


def _has_two_levels(hosts: Sequence[Sequence[int]]) -> bool:
    sizes = {len(host) for host in hosts}
    return len(hosts) > 1 and len(sizes) == 1 and sizes != {1}


def _make_levels(group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> _Levels:
    """Makes the groups of this rank. Collective."""
    names = dist.get_process_group_ranks(group)

    def among(members: Sequence[int], level: str) -> dist.ProcessGroup:
        ranks = [names[member] for member in members]
        made = dist.new_group(
            ranks,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc=f"ddltrace:{level} {','.join(map(str, ranks))}",
        )
        assert isinstance(made, dist.ProcessGroup)
        return made

    # In the order of the ranks, which is that of a group.
    places = [sorted(place) for place in zip(*hosts, strict=True)]
    (host,) = (host for host in hosts if group.rank() in host)
    (place,) = (place for place in places if group.rank() in place)
    return _Levels(
        [rank for place in places for rank in place],
        among(host, "inside host"),
        among(place, "between hosts"),
    )


def _all_gather(name: str, refuse: Refuse) -> Any:
    """An all-gather of encoded parameters, for `FSDPModule.set_custom_all_gather`."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    codec = create(name)

    class EncodedAllGather(_OwnBuffers, AllGather):
        """An all-gather of each rank's encoded part."""

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> None:
            """Returns when the parameters are in the output, or are enqueued on the stream."""
            del async_op
            ranks = group.size()
            if not input_tensor.is_floating_point():
                refuse(f"gather={name} encodes floats, and the job gathers {input_tensor.dtype}")
            with Coding("encode", input_tensor.nbytes) as coding:
                sent = codec.encode(input_tensor.view(-1)).data
                coding.bytes_out = sent.nbytes
            received = sent.new_empty(ranks * sent.numel())
            dist.all_gather_into_tensor(received, sent, group=group)
            with Coding("decode", received.nbytes) as coding:
                parts = received.view(ranks, -1)
                decoded = codec.decode_rows(parts, input_tensor.numel(), input_tensor.dtype)
                output_tensor.copy_(decoded.view(-1))
                coding.bytes_out = output_tensor.nbytes

    return EncodedAllGather()
