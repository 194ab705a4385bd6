"""Matches messages that have arrived with the receives that wait for them."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import NamedTuple

import torch

Future = torch.futures.Future[list[torch.Tensor]]
"""A send or receive: completes with its tensor."""


class Key(NamedTuple):
    """Identifies the message of a receive.

    Attributes:
        source: Rank of the sender in the group.
        channel: 0 for sends of the user, 1 for those inside a collective.
        tag: The message's tag.
    """

    source: int
    channel: int
    tag: int


class _Receive(NamedTuple):
    into: torch.Tensor
    done: Future


class Mailbox:
    """Messages and receives of one rank, each in order for every key.

    Messages without a receive are kept, so that a sender is never blocked by the order of this
    rank's receives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: defaultdict[Key, deque[memoryview]] = defaultdict(deque)
        self._waiting: defaultdict[Key, deque[_Receive]] = defaultdict(deque)
        self._lost: dict[int, str] = {}

    def deliver(self, key: Key, payload: memoryview) -> None:
        """Adds a message that has arrived."""
        with self._lock:
            receive = self._waiting[key].popleft() if self._waiting[key] else None
            if receive is None:
                self._arrived[key].append(payload)
        if receive is not None:
            _complete(receive, payload)

    def receive(self, key: Key, into: torch.Tensor) -> Future:
        """Receives the next message of a key.

        Args:
            key: Key of the message.
            into: Receives the payload: contiguous and of the message's size.

        Returns:
            A future that completes with ``[into]``, or with an error if the sender is gone or the
            size differs.
        """
        receive = _Receive(into, torch.futures.Future())
        payload: memoryview | None = None
        reason: str | None = None
        with self._lock:
            if self._arrived[key]:
                payload = self._arrived[key].popleft()
            elif (reason := self._lost.get(key.source)) is None:
                self._waiting[key].append(receive)
        if payload is not None:
            _complete(receive, payload)
        elif reason is not None:
            fail(receive.done, RuntimeError(reason))
        return receive.done

    def lose(self, source: int, reason: str) -> None:
        """Fails all receives from a rank that is gone, now and later."""
        with self._lock:
            self._lost.setdefault(source, reason)
            keys = [key for key in self._waiting if key.source == source]
            failed = [receive for key in keys for receive in self._waiting.pop(key)]
        for receive in failed:
            fail(receive.done, RuntimeError(reason))


def fail(done: Future, error: Exception) -> None:
    """Completes a future with an error, which is raised where the job waits."""
    # The annotation of PyTorch's method requires a result.
    done.set_exception(error)  # type: ignore[arg-type]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _complete(receive: _Receive, payload: memoryview) -> None:
    try:
        copy_into(receive.into, payload)
    except Exception as error:  # noqa: BLE001 - raised where the job waits
        fail(receive.done, error)
    else:
        receive.done.set_result([receive.into])


def copy_into(tensor: torch.Tensor, payload: memoryview) -> None:
    """Copies a message's payload into a contiguous tensor.

    Raises:
        RuntimeError: The sizes differ.
    """
    expected = tensor.numel() * tensor.element_size()
    if payload.nbytes != expected:
        raise RuntimeError(f"a message of {payload.nbytes} bytes came instead of {expected}")
    if expected:
        as_bytes(tensor)[:] = payload
