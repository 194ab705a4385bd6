"""Tensor parallelism of the GPT: heads and hidden features are divided over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddltrace.experiments.parallelism.rank_functions import copy_to_ranks, sum_over_ranks
from ddltrace.experiments.parallelism.split_training import SplitTraining, gather_states
from ddltrace.experiments.workloads.base import Workload
from ddltrace.experiments.workloads.gpt import Block, GptModel, attend
from ddltrace.experiments.workloads.sizes import HEADS

_ROWS = ("attention.weight", "attention.bias", "expand.weight", "expand.bias")
"""Parameters whose rows are divided; of the attention's, those of query, key and value each."""
_COLUMNS = ("attention_output.weight", "contract.weight")


class TensorParallelTraining(SplitTraining):
    """All ranks compute the batch of all ranks, each with its part of each block."""

    needs_all_examples = True

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        """Divides the blocks.

        Args:
            workload: A workload whose model is a `GptModel`.
            learning_rate: Learning rate of the workload's optimizer.
        """
        super().__init__(workload)
        assert isinstance(workload.model, GptModel)
        blocks: list[Any] = list(workload.model.blocks)
        self._whole = [Block(block.width) for block in blocks]
        workload.model.blocks = nn.ModuleList(
            _PartOfBlock(block, self.rank, self.ranks) for block in blocks
        )
        self._optimizer = workload.optimizer(learning_rate)

    def join(self) -> None:
        """Puts the parts of each block together, on all ranks."""
        model = self.workload.model
        assert isinstance(model, GptModel)
        for whole, part in zip(self._whole, list(model.blocks), strict=True):
            states = gather_states(part.state_dict())
            whole.load_state_dict({name: _joined(name, states) for name in states[0]})
        model.blocks = nn.ModuleList(self._whole)


class _PartOfBlock(nn.Module):
    """One rank's heads and hidden features; biases after a sum are added once, by all alike."""

    def __init__(self, block: Block, rank: int, ranks: int) -> None:
        super().__init__()
        self._heads = HEADS // ranks
        width = block.width
        self.attention_norm, self.forward_norm = block.attention_norm, block.forward_norm
        self.attention = nn.Linear(width, 3 * width // ranks)
        self.attention_output = nn.Linear(width // ranks, width)
        self.expand = nn.Linear(width, 4 * width // ranks)
        self.contract = nn.Linear(4 * width // ranks, width)
        whole = block.state_dict()
        self.load_state_dict({name: _part(name, whole[name], rank, ranks) for name in whole})

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """As that of the whole block."""
        own = copy_to_ranks(self.attention_norm(features))
        mixed = attend(self.attention(own), self._heads)
        features = features + _output(self.attention_output, mixed)
        hidden = functional.gelu(self.expand(copy_to_ranks(self.forward_norm(features))))
        return features + _output(self.contract, hidden)


def _output(layer: nn.Linear, parts: torch.Tensor) -> torch.Tensor:
    return sum_over_ranks(functional.linear(parts, layer.weight)) + layer.bias


def _part(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """One rank's part of a parameter of a block."""
    if name in _ROWS:
        kinds = value.chunk(3) if name.startswith("attention.") else [value]
        return torch.cat([kind.chunk(ranks)[rank] for kind in kinds]).clone()
    return value.chunk(ranks, dim=1)[rank].clone() if name in _COLUMNS else value.clone()


def _joined(name: str, states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The whole of a parameter from the parts of all ranks."""
    parts = [state[name] for state in states]
    if name in _ROWS:
        kinds = 3 if name.startswith("attention.") else 1
        return torch.cat([part.chunk(kinds)[kind] for kind in range(kinds) for part in parts])
    return torch.cat(parts, dim=1) if name in _COLUMNS else parts[0]
