"""Trains two models in turns, as adversarial networks are: some backward passes reach both.

The ranks use different parameters. A second phase wraps the models again.

Usage: two_models.py OUTPUT, which gets a digest of each rank's parameters.
"""

import hashlib
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 10


class Layers(nn.Module):
    """Linear layers, and beside the first one another that only one of two ranks uses."""

    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.beside = nn.Linear(*sizes[:2])

    def forward(self, values):
        first = self.layers[0](values)
        if self.uses_beside:
            first = first + self.beside(values)
        for layer in self.layers[1:]:
            first = layer(nn.functional.leaky_relu(first, 0.2))
        return first


def train(generator, discriminator, numbers):
    """One phase of the training, with optimizers of its own."""
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.9)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9)
    loss = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        for model in (generator, discriminator):
            model.module.uses_beside = step % 2 == dist.get_rank()
        real, noise = (torch.randn(8, size, generator=numbers) for size in (32, 16))
        of_discriminator.zero_grad()
        loss(discriminator(real), torch.ones(8, 1)).backward()
        made = generator(noise)
        loss(discriminator(made.detach()), torch.zeros(8, 1)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss(discriminator(made), torch.ones(8, 1)).backward()
        of_generator.step()


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
models = [Layers(16, 64, 128, 32), Layers(32, 128, 64, 1)]
numbers = torch.Generator().manual_seed(dist.get_rank())
for _ in range(2):
    first, second = (DistributedDataParallel(m, find_unused_parameters=True) for m in models)
    train(first, second, numbers)
found = hashlib.sha256()
for model in models:
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
Path(sys.argv[1] + f".{dist.get_rank()}").write_text(found.hexdigest())
dist.barrier()
dist.destroy_process_group()
