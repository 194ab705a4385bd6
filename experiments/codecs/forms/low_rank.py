"""PowerSGD's exchange: an all-reduce of the left factors, then one of the right factors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ddltrace.experiments.codecs.feedback import FeedbackCodec
from ddltrace.experiments.codecs.forms.base import Coding, Form, Landing, Part
from ddltrace.experiments.codecs.power_sgd import PowerSgd, PowerSgdCodec, orthonormal
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.messages.message_exchange import Handle


@dataclass
class _Matrix:
    """One matrix of a message: its position in the payload, and its factors."""

    key: Hashable
    start: int
    stop: int
    matrix: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


class LowRankForm(Form):
    """Averages the factors of the ranks' matrices; other tensors go with the left factors.

    With feedback a rank's residual is its own matrix minus the averaged approximation, as in
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.
    """

    def __init__(
        self,
        codec: PowerSgdCodec,
        feedback: FeedbackCodec | None,
        collectives: Collectives,
        second_collectives: Collectives,
    ) -> None:
        """Takes the codec.

        Args:
            codec: Keeps the right factors from step to step.
            feedback: Keeps residuals; None without feedback.
            collectives: Collectives over the ranks; carry the left factors.
            second_collectives: The same ranks; carry the right factors.
        """
        self._codec = codec
        self._feedback = feedback
        self._steps: dict[Hashable, int] = {}
        self._collectives, self._second_collectives = collectives, second_collectives

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Computes the left factors and launches their all-reduce."""
        description = self._codec.description
        assert isinstance(description, PowerSgd)
        wide = torch.float32 if payload.dtype.itemsize < 4 else payload.dtype
        matrices: list[_Matrix] = []
        plain: list[tuple[int, int]] = []
        at = 0
        with Coding("encode", payload.nbytes) as coding:
            for part in parts:
                stop = at + part.tensor.numel()
                factors = description.factors(part.tensor.shape)
                step = self._steps[part.key] = self._steps.get(part.key, 0) + 1
                if step <= description.start:
                    factors = None
                if factors is None:
                    plain.append((at, stop))
                else:
                    rows, columns, rank = factors
                    flat = part.tensor.reshape(-1)
                    if self._feedback is not None:
                        flat = self._feedback.compensated(flat, part.key)
                    matrix = flat.to(wide).view(rows, columns)
                    p = self._codec.start(matrix, rank, part.key)
                    matrices.append(_Matrix(part.key, at, stop, matrix, p, p))
                at = stop
            lefts = [entry.p.reshape(-1) for entry in matrices]
            first = torch.cat([*lefts, *(payload[a:b].to(wide) for a, b in plain)])
            coding.bytes_out = first.nbytes
        first.div_(self._collectives.size())
        work = self._collectives.all_reduce(first)

        def land() -> torch.Tensor:
            work.wait()
            second = self._right_factors(matrices, first)
            if matrices:
                self._second_collectives.all_reduce(second).wait()
            with Coding("decode", first.nbytes + second.nbytes) as coding:
                at = sum(entry.p.numel() for entry in matrices)
                for start, stop in plain:
                    payload[start:stop] = first[at : at + stop - start]
                    at += stop - start
                self._approximate(matrices, second, payload)
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _right_factors(self, matrices: Sequence[_Matrix], first: torch.Tensor) -> torch.Tensor:
        """This rank's share of every Q = M^T P, one after the other."""
        with Coding("encode", sum(entry.matrix.nbytes for entry in matrices)) as coding:
            at = 0
            for entry in matrices:
                rows, rank = entry.p.shape
                entry.p = orthonormal(first[at : at + rows * rank].view(rows, rank))
                entry.q = entry.matrix.t() @ entry.p
                at += rows * rank
            rights = [entry.q.reshape(-1) for entry in matrices]
            second = torch.cat(rights) if rights else first.new_empty(0)
            coding.bytes_out = second.nbytes
        return second.div_(self._collectives.size())

    def _approximate(
        self, matrices: Sequence[_Matrix], second: torch.Tensor, payload: torch.Tensor
    ) -> None:
        at = 0
        for entry in matrices:
            columns, rank = entry.q.shape
            q = second[at : at + columns * rank].view(columns, rank)
            at += columns * rank
            payload[entry.start : entry.stop] = (entry.p @ q.t()).view(-1)
            self._codec.remember(q, entry.key)
            if self._feedback is not None:
                sent = payload[entry.start : entry.stop]
                self._feedback.keep(entry.matrix.view(-1), sent, entry.key)
