"""One rank's part of an encoded message, without a network: for codecs.py and for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddltrace.experiments.codecs.codec_exchange import CodecExchange
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.messages.message_exchange import Pending
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.strategy.spec import parse


class LoopbackCollectives(Collectives):
    """Collectives of a rank to which all other ranks send what it sends to itself."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        """Number of ranks."""
        return self._ranks

    def rank(self) -> int:
        """The first one."""
        return 0

    def all_reduce(self, vector: torch.Tensor) -> Pending:
        """The sum of equal vectors."""
        vector.mul_(self._ranks)
        return _Done()

    def maximum(self, vector: torch.Tensor) -> None:
        """The vector itself."""

    def all_gather(self, received: list[torch.Tensor], data: torch.Tensor) -> Pending:
        """Copies the rank's own."""
        length = data.numel()  # all are views of one buffer
        received[0].as_strided((self._ranks, length), (length, 1)).copy_(data)
        return _Done()

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        """Copies the rank's own piece."""
        received.view(self._ranks, -1).copy_(sent[: sent_lengths[0]])
        return _Done()


class _Done:
    def wait(self) -> object:
        """Nothing to wait for."""
        return None


class _NoGroup:
    """Stands for the process group, which only collectives use."""


class LoopbackMessage:
    """The first rank's part of one message: encoding, copies instead of a network, decoding."""

    def __init__(self, spec: str, ranks: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """Makes the message.

        Args:
            spec: The codec.
            ranks: Number of ranks.
            shapes: Shapes of the tensors.
        """
        strategy: Any = parse(spec)
        group: Any = _NoGroup()
        gradients = [Gradient(i, f"p{i}", math.prod(s), shape=s) for i, s in enumerate(shapes)]
        (self._message,) = MessagePlan(gradients, [[whole(g) for g in gradients]]).messages
        self.collectives = LoopbackCollectives(ranks), LoopbackCollectives(ranks)
        self._exchange = CodecExchange(
            strategy.codec, strategy.feedback, group, group, self.collectives
        )
        self._exchange.prepare({gradient.index: gradient for gradient in gradients})
        self._gradients = torch.randn(self._message.elements)

    def run(self) -> None:
        """Averages the message once."""
        self._exchange.start(self._message, self._gradients.clone()).wait()


class Operations(TorchDispatchMode):
    """Counts torch's operations.

    Attributes:
        count: Their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def resnet_shapes() -> list[tuple[int, ...]]:
    """Shapes of the parameters of ResNet-56: convolutions with their normalizations, a layer."""
    shapes: list[tuple[int, ...]] = []
    inputs = 3
    for outputs, layers in ((16, 19), (32, 18), (64, 18)):
        for _ in range(layers):
            shapes += [(outputs, inputs, 3, 3), (outputs,), (outputs,)]
            inputs = outputs
    return [*shapes, (10, 64), (10,)]
