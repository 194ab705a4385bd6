"""A ResNet-like network: many small tensors, and bytes that grow towards the output.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from __future__ import annotations

import torch
from torch import nn

from ddltrace.experiments.workloads.images import CLASSES, ImageWorkload


class ResNet(ImageWorkload):
    """A convolution and three stages of two residual blocks each, 1, 2 and 4 times `width` wide.

    Group normalization (Wu & He, ECCV 2018) in place of batch normalization, whose running
    averages would travel beside the gradients. Width 16: 0.2 million parameters; 32: 0.7.
    """

    @staticmethod
    def build(width: int) -> nn.Module:
        """Makes the network with fresh weights."""
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.GroupNorm(1, width),
            nn.ReLU(),
            _Block(width, width, stride=1),
            _Block(width, width, stride=1),
            _Block(width, 2 * width, stride=2),
            _Block(2 * width, 2 * width, stride=1),
            _Block(2 * width, 4 * width, stride=2),
            _Block(4 * width, 4 * width, stride=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, CLASSES),
        )


class _Block(nn.Module):
    """Two normalized convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(1, channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(1, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features of shape N x channels_out x H / stride x W / stride."""
        features = torch.relu(self.first_norm(self.first(images)))
        features = self.second_norm(self.second(features))
        return torch.relu(features + self.shortcut(images))
