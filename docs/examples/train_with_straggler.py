"""The digits training, on ranks of which one prepares its images the slow way.

Rank 1 smooths every image it loads with a filter written in Python, as a host does whose
image library lacks its fast path. Ask a trace who is late, and why:

    ddltrace run -- torchrun --nproc-per-node 2 docs/examples/train_with_straggler.py
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from train_digits import DigitsNet, digits

_PASSES = 12


class Smoothed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The digits, each image smoothed again and again when it is asked for."""

    def __init__(self) -> None:
        self._digits = digits()

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Image of shape (1, 8, 8) and its class."""
        image, label = self._digits[index]
        rows = image[0].tolist()
        inner = range(1, 7)
        for y, x in (pixel for _ in range(_PASSES) for pixel in product(inner, inner)):
            near = [rows[y + dy][x + dx] for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
            rows[y][x] = sum(near) / 9
        return torch.tensor([rows]), label


def main() -> None:
    """Trains for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = Smoothed() if dist.get_rank() == 1 else digits()
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=24, sampler=sampler)
    model = DistributedDataParallel(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _, (images, classes) in zip(range(arguments.steps), loader, strict=False):
        optimizer.zero_grad()
        criterion(model(images), classes).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
