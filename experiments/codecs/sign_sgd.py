"""signSGD with majority vote: Bernstein et al., arXiv 1810.05291.

With ``feedback`` it is EF-signSGD (Karimireddy et al., arXiv 1901.09847): the signs are scaled
by the mean magnitude and averaged, and there is no vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.codecs.chunks import added
from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    RowCodec,
    as_bytes,
    finite_or_nan,
    floats_at_start,
    packed_bytes,
)
from ddltrace.experiments.codecs.packing import pack_signs, signs_to_values
from ddltrace.experiments.codecs.random_bits import RandomBits
from ddltrace.experiments.lazy_torch import torch
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

    def codec(self, seed: int | None) -> Codec:
        """Votes."""
        return SignSgdCodec(self, seed=seed)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One bit an element and one float32 scale, which carries NaN."""
        return 4 + packed_bytes(elements, 1) if elements else 0


_HEADER = 4


class SignSgdCodec(RowCodec):
    """One bit an element. The scale is 1, or the mean magnitude below a residual.

    A vote of zero, as of a gradient that is zero or of a tie, is cast at random: one bit has no
    third value, and a fixed one would move all such elements the same way in every step.

    A tensor with an infinite or NaN element decodes to NaN as a whole: its scale is NaN.

    Attributes:
        votes: Whether payloads are votes, of which the exchange takes the majority.
    """

    def __init__(
        self, description: CodecDescription, *, seed: int | None = None, scaled: bool = False
    ) -> None:
        super().__init__(description)
        self.votes = not scaled
        self._random = RandomBits(seed)

    def with_feedback(self) -> Codec:
        """EF-signSGD's form: signs scaled by the mean magnitude."""
        return SignSgdCodec(self.description, seed=0, scaled=True)

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Packs the signs of all rows together."""
        data = self._empty_payloads(rows)
        sums: list[torch.Tensor] = []

        def add(values: torch.Tensor, signs: torch.Tensor) -> None:
            del signs
            # A product with zero is NaN where the element is not finite.
            part = values.mul_(0) if self.votes else values.abs_()
            sums.append(part.sum(1))

        pack_signs(self._cast(rows) if self.votes else rows, data[:, _HEADER:], add)
        total = added(sums)
        scale = total.add_(1.0) if self.votes else total.div_(rows.shape[1])
        scale = finite_or_nan(scale).to(torch.float32)
        data[:, :_HEADER] = as_bytes(scale.unsqueeze(1))
        return data

    def _cast(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows with 1 or -1, drawn at random, where an element is zero."""
        zero = rows == 0
        if not zero.any():
            return rows
        coins = torch.empty(rows.numel() + rows.numel() % 2, device=rows.device)
        self._random.draw(coins)
        coins = coins[: rows.numel()].view(rows.shape)
        return torch.where(zero, torch.where(coins < 0, -1.0, 1.0).to(rows.dtype), rows)

    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        scale = floats_at_start(data, 1).view(-1)
        signs_to_values(data[:, _HEADER:], -scale, scale, result)
