"""A small training under DDP in which one rank is late in every step, in one activity.

    torchrun --nproc-per-node N late_rank.py RANK ACTIVITY MILLISECONDS BUFFERS STEPS

ACTIVITY is data, forward, backward, optimizer or host; with BUFFERS 1, the model has batch
normalization, whose buffers DDP broadcasts before every forward pass.
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK, ACTIVITY, MS, BUFFERS, STEPS = sys.argv[1:]
LATE_S = float(MS) / 1e3


def pause(activity: str) -> None:
    """The fault, where it is this rank's and this activity's."""
    if activity == ACTIVITY and dist.get_rank() == int(RANK):
        time.sleep(LATE_S)


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
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
