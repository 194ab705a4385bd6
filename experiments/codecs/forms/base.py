"""The base classes of exchanges of encoded tensors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddltrace.experiments.collectives.base import Collectives, Pending
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.message_exchange import Handle
from ddltrace.tracer.codec_events import record_codec


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one message carries.

    Attributes:
        key: Key of the tensor's state.
        tensor: This rank's elements, in the tensor's shape if all are present, else flat.
    """

    key: Hashable
    tensor: torch.Tensor


class Form(ABC):
    """One way to average encoded tensors."""

    @abstractmethod
    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes a message and launches its first collective.

        Args:
            parts: The parts of tensors that the message carries.
            payload: The whole message; the parts are views of it.

        Returns:
            The message in flight; its average has the length and type of `payload`.
        """


class Coding:
    """Times an encoding or decoding as an event of the trace.

    Use::

        with Coding("encode", bytes_in=tensor.nbytes) as coding:
            coding.bytes_out = ...
    """

    def __init__(self, direction: Literal["encode", "decode"], bytes_in: int) -> None:
        self._direction: Literal["encode", "decode"] = direction
        self._bytes_in = bytes_in
        self.bytes_out = 0

    def __enter__(self) -> Coding:
        self._start_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            record_codec(self._direction, self._start_ns, self._bytes_in, self.bytes_out)


class Landing:
    """A message in flight, whose average is computed by `wait`."""

    def __init__(self, land: Callable[[], torch.Tensor]) -> None:
        self._land = land

    def wait(self) -> torch.Tensor:
        """The average."""
        with torch.no_grad():
            return self._land()


def gather_bytes(
    data: torch.Tensor, collectives: Collectives
) -> tuple[Pending | None, torch.Tensor]:
    """Launches an all-gather of equally many bytes from every rank.

    Args:
        data: This rank's bytes, uint8, flat.
        collectives: Collectives over the ranks.

    Returns:
        The collective (None if there is nothing to send), and the received bytes: ranks x bytes.
    """
    received = data.new_empty(collectives.size(), data.numel())
    if data.numel() == 0:
        return None, received
    return collectives.all_gather(list(received.unbind()), data), received
