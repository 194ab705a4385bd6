"""Communicates tensors of a device of its own (``PrivateUse1``) by a backend of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("mydevice")


class OnDevice(torch.Tensor):
    """A tensor of the device, whose memory is a tensor of the CPU."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> OnDevice:
        made: Any = torch._C._acc.create_empty_tensor(memory.shape, memory.dtype)
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class Done(dist.Work):
    """A handle of a message that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class OfDevice(dist.ProcessGroup):
    """A process group for tensors of the device."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner = inner

    def allreduce(self, tensors: list[Any], options: Any = None) -> dist.Work:
        self.inner.allreduce([tensor.memory for tensor in tensors]).wait()
        return Done()

    def broadcast(self, tensors: list[Any], options: Any = None) -> dist.Work:
        self.inner.broadcast([tensor.memory for tensor in tensors]).wait()
        return Done()

    def getBackendName(self) -> str:
        return "mybackend"


def create(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    """What PyTorch makes the group with."""
    inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    return OfDevice(inner, rank, size)


dist.Backend.register_backend("mybackend", create, devices=["mydevice"])
dist.init_process_group("mybackend")
rank = dist.get_rank()
memory = torch.full((1000,), rank + 1.0)
tensor = OnDevice(memory)
dist.all_reduce(tensor)
work = dist.broadcast(tensor, 0, async_op=True)
work.wait()
sys.stdout.write(f"rank {rank} loss {memory.sum().item()} on {tensor.device}\n")
dist.destroy_process_group()
