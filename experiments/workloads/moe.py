"""A small GPT whose feed-forward networks are mixtures of experts.

Fedus et al., "Switch Transformers", JMLR 2022: each token goes to the one expert with the highest
gate, and what it returns is scaled by the gate. No token is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddltrace.experiments.workloads.gpt import Gpt, GptModel, attend
from ddltrace.experiments.workloads.sizes import EXPERTS, HEADS


class Moe(Gpt):
    """As `Gpt`, with four experts in each block.

    Parameters: 72 width^2 in the blocks and 320 width in the embeddings and the output.
    """

    def make_model(self, width: int) -> nn.Module:
        """The model with fresh weights."""
        return MoeModel(width)


class MoeModel(GptModel):
    """The model."""

    blocks: Any

    def make_block(self, width: int) -> nn.Module:
        """A block with experts."""
        return MoeBlock(width)


class MoeBlock(nn.Module):
    """Causal self-attention and a mixture of experts, each beside a shortcut."""

    def __init__(self, width: int) -> None:
        """Makes it with fresh weights.

        Args:
            width: Features of each position.
        """
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts: nn.Module = Experts(width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the same shape, N x T x width."""
        mixed = attend(self.attention(self.attention_norm(features)), HEADS)
        features = features + self.attention_output(mixed)
        tokens = self.forward_norm(features).flatten(0, 1)
        gates, chosen = functional.softmax(self.gate(tokens), dim=1).max(dim=1)
        made = self.experts(tokens, chosen) * gates[:, None]
        result: torch.Tensor = features + made.view_as(features)
        return result


class Experts(nn.Module):
    """All experts on one rank."""

    def __init__(self, width: int) -> None:
        """Makes them with fresh weights.

        Args:
            width: Features of each token.
        """
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(EXPERTS)
        )

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What each token's expert makes of it.

        Args:
            tokens: N x width.
            chosen: The number of each token's expert, N.
        """
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.layers):
            # Also an expert without tokens computes: its gradient is zero, not missing.
            places = (chosen == number).nonzero().view(-1)
            made = made.index_copy(0, places, expert(tokens[places]))
        return made
