"""Encoded messages of FSDP2, and when parameters are gathered.

Through the extension points of ``fully_shard``: its custom all-gather and reduce-scatter, and the
lists of modules to prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddltrace.experiments.codecs import create
from ddltrace.experiments.messages.trace_marks import Coding
from ddltrace.tracer.errors import MissingCapabilityError, UsageError

_EXTENSION: Final = "set_custom_reduce_scatter"


Refuse = Callable[[str], NoReturn]
"""Ends the job because of a message that cannot be encoded, with a reason."""


def _raise(reason: str) -> NoReturn:
    raise UsageError(reason)


def change_messages(
    root: nn.Module, reduce: str, gather: str, prefetch: int, refuse: Refuse = _raise
) -> None:
    """Changes the messages of a sharded model.

    Args:
        root: A module below which `fully_shard` was called, or itself.
        reduce: Codec of gradients, or ``none``.
        gather: Codec of parameters, or ``none``.
        prefetch: How many layers ahead parameters are gathered; 0 leaves that to PyTorch.
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
            module.set_custom_reduce_scatter(_reduce_scatter(reduce, refuse))
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


def _reduce_scatter(name: str, refuse: Refuse) -> Any:
    """A reduce-scatter of encoded gradients, for `FSDPModule.set_custom_reduce_scatter`."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    codec = create(name)

    class EncodedReduceScatter(_OwnBuffers, ReduceScatter):
        """An all-to-all of encoded parts, which are added up in float32."""

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
            with Coding("encode", rows.nbytes) as coding:
                sent = torch.cat(codec.encode_rows(rows, range(ranks)))
                coding.bytes_out = sent.nbytes
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
            with Coding("decode", received.nbytes) as coding:
                total = codec.sum_rows(received.view(1, ranks, -1), rows.shape[1], rows.dtype)
                if op == dist.ReduceOp.AVG:
                    total.div_(ranks)
                output_tensor.copy_(total.view(-1))
                coding.bytes_out = output_tensor.nbytes

    return EncodedReduceScatter()


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
