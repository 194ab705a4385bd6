"""Trains a small convolutional network on scikit-learn's digits with DistributedDataParallel.

An ordinary training script: it knows nothing of ddltrace. Start it by itself with

    torchrun --nproc-per-node 2 docs/examples/train_digits.py

or record it by putting `ddltrace run --` before that.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DigitsNet(nn.Module):
    """Three convolutions and two dense layers for images of 8 x 8 pixels in ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            nn.ReLU(),
        )
        self.hidden = nn.Linear(128 * 4 * 4, 512)
        self.output = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        features = self.features(images).flatten(1)
        scores: torch.Tensor = self.output(torch.relu(self.hidden(features)))
        return scores


def digits() -> TensorDataset:
    """The 1,797 images, scaled to 0..1, with their classes; they come with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target))


def main() -> None:
    """Trains and prints the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    arguments = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for images, classes in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), classes)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = total.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
