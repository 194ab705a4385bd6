"""The messages between workers and servers.

A push is two messages: a `Header`, and a body of the length that it states. Its answer, when the
worker may continue, is one message: a `Reply` and the server's parameters behind it. A body begins
with settings as JSON (none if they have not changed), then has two integers for each key, its
payload's length (-1: there is no gradient) and its codec's draw, then the payloads. Once, before
its first push, a worker sends a header and a body with the keys and the values of all parameters,
and behind them the optimizer's state of a loaded checkpoint. A worker that saves a checkpoint asks
for the optimizer's state with a header; the answer is two messages, its length and the state.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ddltrace.experiments.codecs.codec import Codec, Payload, as_bytes, view_as

HEADER_TAG: Final = 1
BODY_TAG: Final = 2
REPLY_TAG: Final = 3
STATE_TAG: Final = 4

FIRST: Final = 0
"""Brings the parameters with which training begins; it is not answered."""
PUSH: Final = 1
FINISH: Final = 2
"""The worker pushes no more; it is answered when no worker does."""
STATE: Final = 3
"""Asks for the optimizer's state."""

KeyState = dict[str, torch.Tensor]
"""State of the optimizer for one key: flat tensors of its elements, and 0-d tensors."""

_HEADER_FIELDS: Final = 5
_REPLY_FIELDS: Final = 4


@dataclass(frozen=True)
class Header:
    """The header of a message from a worker.

    Attributes:
        kind: `FIRST`, `PUSH`, `FINISH` or `STATE`.
        clock: The worker's step.
        computed_ns: Time that the worker computed for the step.
        settings_bytes: Length of the body's settings.
        body_bytes: Length of the whole body.
    """

    kind: int
    clock: int
    computed_ns: int = 0
    settings_bytes: int = 0
    body_bytes: int = 0

    def tensor(self) -> torch.Tensor:
        """As it travels: int64."""
        return torch.tensor(
            [self.kind, self.clock, self.computed_ns, self.settings_bytes, self.body_bytes]
        )

    @staticmethod
    def empty() -> torch.Tensor:
        """Takes a header that arrives."""
        return torch.empty(_HEADER_FIELDS, dtype=torch.int64)

    @staticmethod
    def read(tensor: torch.Tensor) -> Header:
        """The header of a tensor that has arrived."""
        return Header(*tensor.tolist())


@dataclass(frozen=True)
class Key:
    """A part of a parameter that a server holds.

    Attributes:
        parameter: Index of the parameter.
        start: First element.
        stop: End, exclusive.
        dtype: Element type, as in `torch`.
        group: Number of the optimizer's parameter group; -1 if no optimizer updates it.
    """

    parameter: int
    start: int
    stop: int
    dtype: str
    group: int = -1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def type(self) -> torch.dtype:
        """The element type."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return self.elements * self.type.itemsize


@dataclass(frozen=True)
class Reply:
    """The header of a message from a server.

    Attributes:
        clock: The step that the worker may begin; by rounds, the server's round.
        slowest: The smallest number of updates of an active worker that the parameters hold.
        blocked_ns: Time for which the server delayed the answer.
        filled: Whether the server has parameters.
    """

    clock: int
    slowest: int
    blocked_ns: int
    filled: bool


def reply_bytes(keys: Sequence[Key]) -> int:
    """Length of a reply with its parameters."""
    return 8 * _REPLY_FIELDS + sum(key.nbytes for key in keys)


def write_reply(reply: Reply, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A reply as it travels; the values are copied."""
    head = torch.tensor([reply.clock, reply.slowest, reply.blocked_ns, int(reply.filled)])
    return torch.cat([as_bytes(head), *(as_bytes(value) for value in values)])


def read_reply(data: torch.Tensor, keys: Sequence[Key]) -> tuple[Reply, list[torch.Tensor]]:
    """A reply that has arrived, and the value of each key, flat."""
    at = 8 * _REPLY_FIELDS
    clock, slowest, blocked_ns, filled = view_as(data[:at], torch.int64).tolist()
    return Reply(clock, slowest, blocked_ns, bool(filled)), read_values(data[at:], keys)


def write_body(
    settings: Any, gradients: Sequence[Payload | torch.Tensor | None]
) -> tuple[int, torch.Tensor]:
    """The body of a push.

    Args:
        settings: Settings as JSON values; None for no change.
        gradients: For each key its gradient, flat or encoded; None where there is none.

    Returns:
        Length of the settings, and the body.
    """
    text = b"" if settings is None else json.dumps(settings).encode()
    table, parts = [], []
    for gradient in gradients:
        data = None
        if isinstance(gradient, Payload):
            data = gradient.data
        elif gradient is not None:
            data = as_bytes(gradient)
        draw = gradient.draw if isinstance(gradient, Payload) else 0
        table += [-1 if data is None else data.numel(), draw]
        parts += [] if data is None else [data]
    head = [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
    return len(text), torch.cat([*head, as_bytes(torch.tensor(table)), *parts])


def read_body(
    data: torch.Tensor, settings_bytes: int, keys: Sequence[Key], codec: Codec | None
) -> tuple[Any, list[torch.Tensor | None]]:
    """Decodes the body of a push.

    Args:
        data: The body.
        settings_bytes: Length of its settings.
        keys: The server's keys.
        codec: Decodes gradients; None if they are not encoded.

    Returns:
        The settings (None if it has none), and the gradient of each key, flat.
    """
    settings = read_settings(data, settings_bytes)
    table_end = settings_bytes + 16 * len(keys)
    table = view_as(data[settings_bytes:table_end], torch.int64).tolist()
    at = table_end
    gradients: list[torch.Tensor | None] = []
    for number, key in enumerate(keys):
        length, draw = table[2 * number : 2 * number + 2]
        if length < 0:
            gradients.append(None)
            continue
        piece = data[at : at + length]
        at += length
        if codec is None:
            gradients.append(view_as(piece, key.type))
        else:
            payload = Payload(piece, (key.elements,), key.type, draw)
            gradients.append(codec.decode(payload))
    return settings, gradients


def read_settings(data: torch.Tensor, settings_bytes: int) -> Any:
    """The settings at the beginning of a body; None if it has none."""
    return json.loads(bytes(data[:settings_bytes].numpy())) if settings_bytes else None


def read_values(data: torch.Tensor, keys: Sequence[Key]) -> list[torch.Tensor]:
    """The value of each key, flat, from the bytes of all of them."""
    values = []
    at = 0
    for key in keys:
        values.append(view_as(data[at : at + key.nbytes], key.type))
        at += key.nbytes
    return values


def write_states(states: Sequence[KeyState]) -> torch.Tensor:
    """The optimizer's state of some keys as it travels: bytes; empty if no key has any."""
    if not any(states):
        return torch.empty(0, dtype=torch.uint8)
    data = io.BytesIO()
    # Views would be saved with the whole tensor behind them.
    torch.save([{name: t.clone() for name, t in state.items()} for state in states], data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def read_states(data: torch.Tensor) -> list[KeyState]:
    """What `write_states` wrote; an empty list for no bytes."""
    if not data.numel():
        return []
    found: list[KeyState] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return found
