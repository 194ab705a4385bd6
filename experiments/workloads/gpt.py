"""A small GPT that predicts the next character of Python's own documentation.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The text is the help
that comes with Python (``pydoc_data.topics``, about 0.5 MB of English and code); it differs a
little from one version of Python to the next.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddltrace.experiments.workloads.base import Workload
from ddltrace.experiments.workloads.sizes import HEADS, LAYERS
from ddltrace.tracer.errors import MissingCapabilityError

CONTEXT = 64
_STRIDE = 32
_SYMBOLS = 128
_HELD_OUT_SHARE = 0.1


class Gpt(Workload):
    """Two pre-norm transformer blocks of `width` features over 64 characters.

    Parameters: 24 width^2 in the blocks and 320 width in the embeddings and the output (width
    128: 0.4 million; 256: 1.7 million). The last tenth of the text is held out.

    Attributes:
        model: Input N x 64 character codes, output N x 64 x 128 scores.
    """

    most_scored: ClassVar[int] = 256

    def __init__(self, *, width: int, batch_size: int, seed: int) -> None:
        """Cuts the text into windows and makes the model.

        Args:
            width: Features of each position; rounded up to a multiple of 4, the heads.
            batch_size: Windows per rank and step.
            seed: Seed of the weights and of the order of the windows.

        Raises:
            MissingCapabilityError: This Python comes without its help texts.
        """
        codes = _text()
        split = int(len(codes) * (1 - _HELD_OUT_SHARE))
        torch.manual_seed(seed)
        super().__init__(
            self.make_model(-(-width // HEADS) * HEADS),
            _windows(codes[:split], _STRIDE),
            _windows(codes[split:], CONTEXT),
            batch_size=batch_size,
            seed=seed,
        )

    def make_model(self, width: int) -> nn.Module:
        """The model with fresh weights."""
        return GptModel(width)

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """AdamW, as GPTs are trained."""
        return torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy in nats, mean over all characters of the batch."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def correct(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Whether the most probable character is the next one."""
        return output.argmax(2) == target


def _text() -> torch.Tensor:
    """The help texts in the order of their names, as ASCII codes."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MissingCapabilityError(
            "the workload gpt needs Python's own help texts, the module pydoc_data.topics: "
            "install Python's complete standard library"
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)


def _windows(codes: torch.Tensor, stride: int) -> TensorDataset:
    """Windows of text, and the same windows one character later."""
    windows = codes.unfold(0, CONTEXT + 1, stride)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


class GptModel(nn.Module):
    """The model.

    Attributes:
        blocks: The transformer blocks.
    """

    def __init__(self, width: int) -> None:
        """Makes it with fresh weights.

        Args:
            width: Features of each position, a multiple of the heads.
        """
        super().__init__()
        self.characters = nn.Embedding(_SYMBOLS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(self.make_block(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, _SYMBOLS, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Scores of the next character, N x 64 x 128."""
        places = torch.arange(codes.shape[1], device=codes.device)
        features = self.characters(codes) + self.positions(places)
        for block in self.blocks:
            features = block(features)
        scores: torch.Tensor = self.output(self.norm(features))
        return scores

    def make_block(self, width: int) -> nn.Module:
        """A transformer block with fresh weights."""
        return Block(width)

    def units(self) -> list[tuple[str, nn.Module]]:
        """Modules that follow each other and share their parameters with the model, by name."""
        first = _Embedding(self.characters, self.positions)
        blocks = [(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [("first", first), *blocks, ("last", nn.Sequential(self.norm, self.output))]


class _Embedding(nn.Module):
    def __init__(self, characters: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.characters, self.positions = characters, positions

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Features of each position, N x T x width."""
        places = torch.arange(codes.shape[1], device=codes.device)
        features: torch.Tensor = self.characters(codes) + self.positions(places)
        return features


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each beside a shortcut.

    Attributes:
        width: Features of each position.
    """

    def __init__(self, width: int) -> None:
        """Makes it with fresh weights.

        Args:
            width: Features of each position.
        """
        super().__init__()
        self.width = width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the same shape, N x T x width."""
        mixed = attend(self.attention(self.attention_norm(features)), HEADS)
        features = features + self.attention_output(mixed)
        hidden = functional.gelu(self.expand(self.forward_norm(features)))
        result: torch.Tensor = features + self.contract(hidden)
        return result


def attend(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal self-attention.

    Args:
        projected: Queries, keys and values of all heads, N x T x 3 F.
        heads: Number of heads.

    Returns:
        What the heads give, one after the other, N x T x F.
    """
    batch, length, features = projected.shape
    query, key, value = (
        part.view(batch, length, heads, features // 3 // heads).transpose(1, 2)
        for part in projected.chunk(3, dim=2)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)
