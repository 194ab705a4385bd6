"""The job's own store, through which the tracer's threads on different ranks find each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

PUBLISH_TIMEOUT_S: Final = 60.0
"""How long to wait for another rank, or for its question."""

_POLL_S: Final = 0.05


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""

    def get(self, key: str) -> bytes:
        """Reads a value, and waits for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a number; returns the sum."""


def own_client() -> Store | None:
    """A client of the job's store for one thread of the tracer."""
    import torch.distributed as dist

    c10d: Any = dist
    try:
        store = c10d.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):
        return None
    if store is None:
        return None  # MPI has no store
    client: Store | None = None
    if hasattr(store, "clone"):
        try:
            client = store.clone()
        except RuntimeError as error:
            if "pure virtual" not in str(error):
                raise
            # A store in Python may not implement it, such as that of the fake backend.
        return client
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if isinstance(store, c10d.TCPStore):
        client = c10d.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    elif isinstance(store, c10d.FileStore):
        client = c10d.FileStore(store.path)
    return client


def meeting_address(process_group: Any) -> str | None:
    """The address at which the members of a group met; None if it is not that of a TCPStore."""
    import torch.distributed as dist

    c10d: Any = dist
    _, store = c10d.distributed_c10d._world.pg_map.get(process_group, (None, None))
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, c10d.TCPStore) else None


def read_published(store: Store, key: str, pause: Callable[[float], bool]) -> Any:
    """Waits until another rank has published a JSON value; None if it does not.

    Args:
        store: A client of the store, used by no other thread.
        pause: Waits for so many seconds; true if this rank is about to end.
    """
    deadline = time.monotonic() + PUBLISH_TIMEOUT_S
    # Polled: PyTorch prints a warning when a `get` times out.
    while not store.check([key]):
        if pause(_POLL_S) or time.monotonic() > deadline:
            return None
    return json.loads(store.get(key))


def is_of_ended_store(error: Exception) -> bool:
    """Whether the store's server has ended, as in jobs that are over before their ranks meet."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError)
