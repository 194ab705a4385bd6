"""Image classifiers on scikit-learn's bundled digits: 1,797 real images of 8 x 8 pixels.

Data: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from pathlib import Path

import numpy as np
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


class Vgg(ImageWorkload):
    """Two pairs of convolutions, then three fully connected layers.

    VGG-like: Simonyan & Zisserman, ICLR 2015. The fully connected layers hold 86 % of the
    parameters, as in VGG-19, where they have 124 of 144 million. Their gradients are the first
    ones of the backward pass. Width 32: 0.5 million parameters; 64: 1.8 million.
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


class ResNet(ImageWorkload):
    """A convolution and three stages of two residual blocks each, 1, 2 and 4 times `width` wide.

    ResNet-like (He et al., CVPR 2016): many small tensors, and bytes that grow towards the output.
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


def _load() -> tuple[torch.Tensor, torch.Tensor]:
    require_extra("experiments", "a workload of images", by_import=False)
    # scikit-learn's own `load_digits` reads the same file, after imports of 0.8 s on every rank.
    found = find_spec("sklearn")
    assert found is not None
    assert found.submodule_search_locations is not None
    (folder,) = found.submodule_search_locations
    table = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = np.split(table, [-1], axis=1)
    images = torch.tensor(pixels.reshape(-1, 1, 8, 8), dtype=torch.float32) / _BRIGHTEST
    return images, torch.tensor(labels[:, 0], dtype=torch.int64)
