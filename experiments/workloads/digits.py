"""A small CNN on images of digits."""

from __future__ import annotations

from torch import nn

from ddltrace.experiments.workloads.images import (
    CLASSES,
    ImageWorkload,
    convolutions,
    initialize_convolutions,
)


class Digits(ImageWorkload):
    """Three pairs of convolutions with `width`, 2 `width` and 4 `width` channels.

    Parameters grow with the square of the width (32: 0.3 million, 64: 1.1 million, 128: 4.6
    million), and so does computation: per byte sent, deeper layers compute less, as in the
    CNNs that people train. No batch normalization: the exchange of gradients is all that
    travels.
    """

    @staticmethod
    def build(width: int) -> nn.Module:
        """Makes the CNN with fresh weights."""
        return initialize_convolutions(
            nn.Sequential(
                *convolutions(1, width),
                nn.MaxPool2d(2),
                *convolutions(width, 2 * width),
                nn.MaxPool2d(2),
                *convolutions(2 * width, 4 * width),
                nn.Flatten(),
                nn.Linear(16 * width, CLASSES),
            )
        )
