"""A recommender with sparse embedding gradients: which names does a Python module use?

The data are real and come with Python: the modules of its standard library are the users, the
identifiers in their sources are the items, and an identifier that occurs in a module is a
positive example (implicit feedback). Data of another version of Python differ a little.

The model is neural collaborative filtering (He et al., WWW 2017): embeddings of user and item,
then a small network. A batch touches few rows of the embeddings, so their gradients are sparse
tensors and are exchanged as such.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddltrace.experiments.workloads.base import Workload
from ddltrace.tracer.errors import MissingCapabilityError

_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{2,}")
_FEWEST_MODULES = 3
"""Names that fewer modules use are left out: nothing about them can be learned."""
_HELD_OUT_EVERY = 10
_SPLIT_SEED = 0


class Recommender(Workload):
    """Sparse embeddings of `width` features, and two dense layers.

    Each positive pair of module and name stands beside a random pair that does not occur.

    Attributes:
        model: Input N x 2 numbers of module and name, output N scores.
    """

    def __init__(self, *, width: int, batch_size: int, seed: int) -> None:
        """Reads the modules and makes the model.

        Args:
            width: Features of an embedding.
            batch_size: Pairs per rank and step.
            seed: Seed of the weights and of the order of the data.

        Raises:
            MissingCapabilityError: This Python comes without the sources of its library.
        """
        pairs, labels, modules, names = _pairs()
        held_out = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
        torch.manual_seed(seed)
        super().__init__(
            _Model(modules, names, width),
            TensorDataset(pairs[~held_out], labels[~held_out]),
            TensorDataset(pairs[held_out], labels[held_out]),
            batch_size=batch_size,
            seed=seed,
        )

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Adagrad, which takes sparse gradients and gives rare rows larger steps."""
        return torch.optim.Adagrad(self.model.parameters(), lr=learning_rate)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Binary cross entropy, mean over the batch."""
        return functional.binary_cross_entropy_with_logits(output, target)

    def correct(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Whether the sign of the score separates positive pairs from negative ones."""
        return (output > 0) == (target > 0.5)


def _pairs() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Pairs of module and name in a fixed random order, their labels, and how many of each."""
    used = [
        set(_NAME.findall(path.read_bytes()))
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ]
    counts: dict[bytes, int] = {}
    for names in used:
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    common = sorted(name for name, count in counts.items() if count >= _FEWEST_MODULES)
    if not common:
        raise MissingCapabilityError(
            "the workload recommender needs the sources of Python's standard library "
            f"in {sysconfig.get_paths()['stdlib']}: install them"
        )
    number = {name: index for index, name in enumerate(common)}
    occurs = torch.zeros(len(used), len(common), dtype=torch.bool)
    for module, names in enumerate(used):
        occurs[module, [number[name] for name in names if name in number]] = True
    random = torch.Generator().manual_seed(_SPLIT_SEED)
    positive, absent = occurs.nonzero(), (~occurs).nonzero()
    negative = absent[torch.randperm(len(absent), generator=random)[: len(positive)]]
    order = torch.randperm(len(positive) + len(negative), generator=random)
    labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))])
    return torch.cat([positive, negative])[order], labels[order], *occurs.shape


class _Model(nn.Module):
    def __init__(self, modules: int, names: int, width: int) -> None:
        super().__init__()
        self.modules_table = nn.Embedding(modules, width, sparse=True)
        self.names_table = nn.Embedding(names, width, sparse=True)
        self.hidden = nn.Linear(2 * width, 2 * width)
        self.output = nn.Linear(2 * width, 1)
        for table in (self.modules_table, self.names_table):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Scores of pairs, N."""
        features = torch.cat(
            [self.modules_table(pairs[:, 0]), self.names_table(pairs[:, 1])], dim=1
        )
        scores: torch.Tensor = self.output(torch.relu(self.hidden(features)))
        return scores.squeeze(1)
