"""Recognizes GPU kernels that communicate by their names."""

from __future__ import annotations

from typing import Final

# Every NCCL and RCCL release so far begins its kernels' names with `nccl`; other libraries put
# their own name first.
_LIBRARIES: Final = ("nccl", "rccl", "hccl", "oneccl", "mscclpp")
_INSIDE: Final = ("ncclKernel", "ncclDevKernel")
_SPEAKING: Final = (
    *("nccl", "shmem", "multimem"),
    *("allreduce", "allgather", "reducescatter", "alltoall"),
)


def is_message_kernel(name: str) -> bool:
    """Whether a GPU kernel of that name belongs to a known communication library."""
    return name.startswith(_LIBRARIES) or any(word in name for word in _INSIDE)


def is_suspect_kernel(name: str) -> bool:
    """Whether a kernel's name suggests communication, but belongs to no known library."""
    plain = name.lower().replace("_", "")
    return any(word in plain for word in _SPEAKING) and not is_message_kernel(name)
