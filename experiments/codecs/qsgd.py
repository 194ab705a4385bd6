"""QSGD: Alistarh et al., NeurIPS 2017, arXiv 1610.02132, section 3."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm, packed_bytes
from ddltrace.experiments.technique import technique

_MAX_LEVELS = (1 << 15) - 1


@technique(
    "volume",
    "qsgd",
    "random rounding to s levels of a bucket's norm",
    "QSGD, arXiv 1610.02132",
)
@dataclass(frozen=True)
class Qsgd(CodecDescription):
    """Elements rounded at random to `s` levels of their bucket's norm, without bias.

    Attributes:
        s: Levels on each side of zero.
        bucket: Elements that share one Euclidean norm.
    """

    s: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.s <= _MAX_LEVELS:
            raise ValueError(f"s must be between 1 and {_MAX_LEVELS}")
        if not 8 <= self.bucket <= 1 << 20:
            raise ValueError("bucket must be between 8 and 1048576 elements")

    @property
    def bits(self) -> int:
        """Bits of one code: a sign and one of s + 1 levels."""
        return 1 + self.s.bit_length()

    @property
    def alignment(self) -> int:
        """A shard is a number of whole buckets."""
        return self.bucket

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """The packed codes and one float32 norm a bucket."""
        return 4 * -(-elements // self.bucket) + packed_bytes(elements, self.bits)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather where it sends no more than two encodings of every shard would."""
        return "all_gather" if world_size <= 2 else "all_to_all"
