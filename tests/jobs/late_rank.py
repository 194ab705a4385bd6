"""A small training under DDP in which ranks are late, each in one activity.

    torchrun --nproc-per-node N late_rank.py FAULTS BUFFERS STEPS

FAULTS are divided by commas; each is RANK:ACTIVITY:MILLISECONDS:WORK:FIRST:LAST. ACTIVITY is data,
forward, backward, optimizer or host. WORK is sleep, compute (multiplications), collect (garbage
collections) or memory (page faults); the last three take MILLISECONDS of processor time. The rank
is late in the steps FIRST to LAST - 1. With BUFFERS 1, the model has batch normalization, whose
buffers DDP broadcasts before every forward pass.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULTS, BUFFERS, STEPS = sys.argv[1:]


def multiply() -> None:
    """Multiplies matrices."""
    _ = torch.ones(128, 128) @ torch.ones(128, 128)


def collect() -> None:
    """Makes garbage that only the collector frees, and collects it."""
    for _ in range(2000):
        cycle: list[object] = []
        cycle.append(cycle)
    gc.collect()


def touch() -> None:
    """Touches pages that the process does not have yet."""
    with mmap.mmap(-1, 1 << 22) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1


WORK: dict[str, Callable[[], None]] = {"compute": multiply, "collect": collect, "memory": touch}
faults: list[tuple[str, float, str, range]] = []
"""This rank's: activity, seconds, work, steps."""
step = 0


def read_faults() -> None:
    """Reads the faults of this rank."""
    for text in FAULTS.split(",") if FAULTS else ():
        rank, activity, ms, work, first, last = text.split(":")
        if int(rank) == dist.get_rank():
            faults.append((activity, float(ms) / 1e3, work, range(int(first), int(last))))


def pause(activity: str) -> None:
    """The faults of this activity in this step."""
    for place, seconds, work, steps in faults:
        if place == activity and step in steps:
            if work == "sleep":
                time.sleep(seconds)
                continue
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                WORK[work]()


class Images(Dataset):
    """Random images; reading the first of a batch may take long."""

    def __len__(self) -> int:
        return 8 * int(STEPS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % 8 == 0:
            pause("data")
        return torch.randn(3, 32, 32), index % 10


class Slow(torch.autograd.Function):
    """The identity, whose backward may take long."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        pause("backward")
        return gradient


class Block(nn.Module):
    """A convolution, with the fault of forward and backward between the layers."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(channels) if BUFFERS == "1" else nn.Identity()
        self.layers = nn.Sequential(nn.Conv2d(width, channels, 3, 2, 1), norm, nn.ReLU())
        self.is_faulty = channels == 64

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.is_faulty:
            pause("forward")
            images = Slow.apply(images)
        return self.layers(images)


class Momentum(torch.optim.SGD):
    """SGD with momentum, whose step may take long."""

    def step(self, closure=None):
        pause("optimizer")
        return super().step(closure)


def main() -> None:
    """Trains."""
    global step  # noqa: PLW0603 - a script
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    read_faults()
    torch.manual_seed(0)
    widths = [3, 16, 32, 64, 128]
    blocks = [Block(*pair) for pair in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    model = DistributedDataParallel(nn.Sequential(*blocks, *head), bucket_cap_mb=0.3)
    optimizer = Momentum(model.parameters(), lr=0.01, momentum=0.9)
    for images, labels in DataLoader(Images(), batch_size=8):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        pause("host")
        step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
