"""A VGG-like network: its fully connected layers, the last ones, hold most bytes.

Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR
2015. In VGG-19, 124 of 144 million parameters (86 %) belong to the three fully connected layers.
"""

from __future__ import annotations

from torch import nn

from ddltrace.experiments.workloads.images import (
    CLASSES,
    ImageWorkload,
    convolutions,
    initialize_convolutions,
)


class Vgg(ImageWorkload):
    """Two pairs of convolutions, then three fully connected layers.

    The fully connected layers hold 86 % of the parameters, as in VGG-19. Their gradients are
    the first ones of the backward pass. Width 32: 0.5 million parameters; 64: 1.8 million.
    """

    @staticmethod
    def build(width: int) -> nn.Module:
        """Makes the network with fresh weights."""
        hidden = 16 * width
        return initialize_convolutions(
            nn.Sequential(
                *convolutions(1, width),
                nn.MaxPool2d(2),
                *convolutions(width, 2 * width),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(8 * width, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, CLASSES),
            )
        )
