"""Averages by an all-reduce of codes whose range all ranks share, as THC does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddltrace.experiments.codecs.codec import sum_type
from ddltrace.experiments.codecs.feedback import FeedbackCodec
from ddltrace.experiments.codecs.forms.base import Coding, Form, Landing, Part
from ddltrace.experiments.codecs.thc import ThcCodec
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.messages.message_exchange import Handle


class SharedRangeForm(Form):
    """A small all-reduce of the ranges, which is waited for, then one of the codes.

    A message is one tensor: its blocks do not end where its parts do.
    """

    def __init__(
        self, codec: ThcCodec, feedback: FeedbackCodec | None, collectives: Collectives
    ) -> None:
        """Takes the codec.

        Args:
            codec: Encodes and decodes.
            feedback: Keeps residuals; None without feedback.
            collectives: Collectives over the ranks.
        """
        self._codec = codec
        self._feedback = feedback
        self._collectives = collectives

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes the message and launches the all-reduce of its codes."""
        if not payload.numel():
            return Landing(lambda: payload)
        ranks = self._collectives.size()
        with Coding("encode", payload.nbytes) as coding:
            wanted = self._wanted(parts)
            vector = payload if wanted is None else torch.cat(wanted)
            values, ranges = self._codec.transformed(vector.unsqueeze(0))
            coding.bytes_out = ranges.nbytes
        self._collectives.maximum(ranges)
        with Coding("encode", payload.nbytes) as coding:
            codes = self._codec.codes(values, ranges, ranks)
            if wanted is not None:
                sent = torch.empty_like(vector)
                self._codec.mean(codes * ranks, ranges, ranks, sent.unsqueeze(0))
                self._keep(parts, wanted, sent)
            coding.bytes_out = codes.nbytes
        work = self._collectives.all_reduce(codes.view(-1))

        def land() -> torch.Tensor:
            work.wait()
            with Coding("decode", codes.nbytes) as coding:
                self._codec.mean(codes, ranges, ranks, payload.unsqueeze(0))
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _wanted(self, parts: Sequence[Part]) -> list[torch.Tensor] | None:
        """The parts plus their residuals; None without feedback."""
        if self._feedback is None:
            return None
        return [self._feedback.compensated(part.tensor.reshape(-1), part.key) for part in parts]

    def _keep(
        self, parts: Sequence[Part], wanted: Sequence[torch.Tensor], sent: torch.Tensor
    ) -> None:
        """Stores what was not sent."""
        assert self._feedback is not None
        pieces = torch.split(sent, [part.numel() for part in wanted])
        for part, own, piece in zip(parts, wanted, pieces, strict=True):
            self._feedback.keep(own, piece.to(sum_type(own.dtype)), part.key)
