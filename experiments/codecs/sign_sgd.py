"""signSGD with majority vote: Bernstein et al., arXiv 1810.05291.

With ``feedback`` it is EF-signSGD (Karimireddy et al., arXiv 1901.09847): the signs are scaled
by the mean magnitude and averaged, and there is no vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm, packed_bytes
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "signsgd",
    "signs, decided by majority vote",
    "signSGD, arXiv 1810.05291; with feedback EF-signSGD, arXiv 1901.09847",
    needs=("a learning rate for updates of size 1, unless with feedback",),
)
@dataclass(frozen=True)
class SignSgd(CodecDescription):
    """The sign of each element; the exchange gives the sign of the sum of the ranks' signs.

    A zero votes at random. A tie of an even number of ranks gives zero on two ranks, where votes
    are all-gathered, and a random sign on more, where the vote itself travels in one bit.
    """

    gives_votes: ClassVar[bool] = True

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One bit an element and one float32 scale, which carries NaN."""
        return 4 + packed_bytes(elements, 1) if elements else 0

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Votes are counted shard by shard; all-gather only on two ranks."""
        return "all_gather" if world_size <= 2 else "all_to_all"
