"""The job's own store, as the servers beside the job reach it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddltrace.tracer.errors import MissingCapabilityError

_FOREVER: Final = timedelta(days=365)


def store_address() -> dict[str, Any]:
    """Where the job's store is, for `open_store` in another process.

    Raises:
        MissingCapabilityError: Other processes cannot reach it.
    """
    store: Any = c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return {"host": store.host, "port": store.port}
    if isinstance(store, FileStore):
        file: Any = store
        return {"path": file.path}
    raise MissingCapabilityError(
        "servers of a parameter server need a job whose ranks meet at a TCPStore or a FileStore, "
        f"not at a {type(store).__name__}"
    )


def open_store(address: dict[str, Any], prefix: str) -> Store:
    """A client of its own of the job's store, whose requests may take as long as the job.

    Args:
        address: From `store_address`.
        prefix: Keeps the keys apart from all others.
    """
    store: Any
    if "path" in address:
        store = FileStore(address["path"])
    else:
        store = TCPStore(
            address["host"],
            address["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=_FOREVER,
        )
    return PrefixStore(prefix, store)
