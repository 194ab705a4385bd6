"""Gradients sent in 16 bits, summed in 16 bits.

The same arithmetic as ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``: cast,
divide by the number of ranks, all-reduce, cast back.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "fp16",
    "16-bit floats, summed in 16 bits",
    "PyTorch's fp16_compress_hook",
)
@dataclass(frozen=True)
class Fp16(CodecDescription):
    """IEEE half precision: 11 significant bits, values above 65,504 become infinite."""

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Two bytes an element."""
        return 2 * elements

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Sums of halves are halves: an all-reduce of half the bytes."""
        return "all_reduce"


@technique(
    "volume",
    "bf16",
    "bfloat16, summed in bfloat16",
    "PyTorch's bf16_compress_hook",
)
@dataclass(frozen=True)
class Bf16(CodecDescription):
    """bfloat16: 8 significant bits, the range of float32."""

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Two bytes an element."""
        return 2 * elements

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Sums of halves are halves: an all-reduce of half the bytes."""
        return "all_reduce"
