"""Averages messages over the ranks in encoded form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist

from ddltrace.experiments.codecs.codec import Codec, CodecDescription
from ddltrace.experiments.codecs.dgc import DgcCodec
from ddltrace.experiments.codecs.feedback import FeedbackCodec, Modifier, compose
from ddltrace.experiments.codecs.forms.all_gather import AllGatherForm
from ddltrace.experiments.codecs.forms.all_reduce import AllReduceForm
from ddltrace.experiments.codecs.forms.all_to_all import AllToAllForm
from ddltrace.experiments.codecs.forms.base import Form, Part
from ddltrace.experiments.codecs.forms.low_rank import LowRankForm
from ddltrace.experiments.codecs.forms.shared_range import SharedRangeForm
from ddltrace.experiments.codecs.forms.votes import combination_of
from ddltrace.experiments.codecs.half_precision import HalfPrecisionCodec
from ddltrace.experiments.codecs.power_sgd import PowerSgdCodec
from ddltrace.experiments.codecs.thc import ThcCodec
from ddltrace.experiments.collectives.base import Collectives, LibraryCollectives
from ddltrace.experiments.messages.message_exchange import Handle, MessageExchange
from ddltrace.experiments.messages.message_plan import Gradient, Message


class CodecExchange(MessageExchange):
    """Encodes a message's tensors, exchanges the payloads in the codec's form, and decodes.

    All ranks get the same average to the last bit. State of a tensor, such as a residual,
    belongs to its gradient's index and range, so it outlives a new plan of messages.
    """

    rounds: ClassVar[int] = 2

    def __init__(
        self,
        codec: CodecDescription | None,
        modifier: Modifier | None,
        group: dist.ProcessGroup,
        second_group: dist.ProcessGroup,
        collectives: tuple[Collectives, Collectives] | None = None,
    ) -> None:
        """Creates the codec.

        Args:
            codec: The strategy's codec.
            modifier: Its modifier, such as error feedback.
            group: The ranks.
            second_group: The same ranks in another group, for second passes.
            collectives: Collectives over the two groups; by default the library's own.
        """
        super().__init__(group, second_group)
        description = compose(codec, modifier)
        assert description is not None
        self._collectives = collectives or (
            LibraryCollectives(group),
            LibraryCollectives(second_group),
        )
        own = description.codec(None)
        self._dgc = own if isinstance(own, DgcCodec) else None
        self._form = _form_of(own, *self._collectives)
        self._shapes: dict[int, tuple[int, ...]] = {}

    def prepare(self, gradients: Mapping[int, Gradient]) -> None:
        """Stores the shapes of the gradients."""
        self._shapes = {index: gradient.shape for index, gradient in gradients.items()}

    def take_momentum(self, momentum: float) -> None:
        """Lets DGC correct by the momentum of the job's optimizer."""
        if self._dgc is not None:
            self._dgc.take_momentum(momentum)

    def close(self) -> None:
        """Closes the collectives."""
        for each in self._collectives:
            each.close()

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Encodes, and launches the first collective."""
        parts = []
        at = 0
        for piece in message.slices:
            tensor = payload[at : at + piece.elements]
            at += piece.elements
            shape = self._shapes.get(piece.gradient, ())
            if math.prod(shape) == piece.elements:
                tensor = tensor.view(shape)
            parts.append(Part((piece.gradient, piece.start, piece.stop), tensor))
        with torch.no_grad():
            return self._form.start(parts, payload)


def _form_of(codec: Codec, first: Collectives, second: Collectives) -> Form:
    """The exchange that the codec's own formula chooses on this many ranks."""
    description = codec.description
    inner = codec.inner if isinstance(codec, FeedbackCodec) else codec
    feedback = codec if isinstance(codec, FeedbackCodec) else None
    if isinstance(inner, PowerSgdCodec):
        return LowRankForm(inner, feedback, first, second)
    if isinstance(inner, ThcCodec):
        return SharedRangeForm(inner, feedback, first)
    if isinstance(inner, DgcCodec):
        inner.ranks = first.size()
    # None of the formulas depends on the size of the tensor but PowerSGD's.
    form = description.exchange(1, first.size())
    if form == "all_reduce":
        dtype = inner.dtype if isinstance(inner, HalfPrecisionCodec) else None
        return AllReduceForm(codec, dtype, first)
    if form == "all_gather":
        return AllGatherForm(codec, first, combination_of(codec))
    server = description.second_pass.codec(None)
    return AllToAllForm(codec, server, first, second, combination_of(codec))
