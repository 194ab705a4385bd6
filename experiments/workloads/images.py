"""Image classifiers on scikit-learn's bundled digits: 1,797 real images of 8 x 8 pixels.

Data: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddltrace.experiments.workloads.base import Workload
from ddltrace.tracer.optional_packages import require_extra

CLASSES = 10
_HELD_OUT_EVERY = 5
_BRIGHTEST = 16.0


class ImageWorkload(Workload):
    """A classifier of the digits; a fifth of the images is held out.

    Attributes:
        model: Input N x 1 x 8 x 8, output N x 10.
    """

    def __init__(self, *, width: int, batch_size: int, seed: int) -> None:
        """Loads the data and makes the model.

        Args:
            width: Size of the model.
            batch_size: Examples per rank and step.
            seed: Seed of the weights, the split and the order of the data.

        Raises:
            MissingCapabilityError: scikit-learn is not installed.
        """
        images, labels = _load()
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        held_out = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
        train, test = shuffled[~held_out], shuffled[held_out]
        torch.manual_seed(seed)
        super().__init__(
            self.build(width),
            TensorDataset(images[train], labels[train]),
            TensorDataset(images[test], labels[test]),
            batch_size=batch_size,
            seed=seed,
        )

    @staticmethod
    @abstractmethod
    def build(width: int) -> nn.Module:
        """Makes the model with fresh weights."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy, mean over the batch."""
        return functional.cross_entropy(output, target)

    def correct(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Whether the class with the largest score is the image's."""
        return output.argmax(1) == target


def initialize_convolutions(model: nn.Module) -> nn.Module:
    """Gives convolutions He's initialization: without normalization, the default one fades.

    He et al., "Delving Deep into Rectifiers", ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def convolutions(channels_in: int, channels_out: int) -> list[nn.Module]:
    """A pair of 3 x 3 convolutions, each with a ReLU."""
    return [
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.ReLU(),
    ]


def _load() -> tuple[torch.Tensor, torch.Tensor]:
    require_extra("experiments", "a workload of images")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / _BRIGHTEST
    return images, torch.tensor(digits.target, dtype=torch.int64)
