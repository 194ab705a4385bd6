"""A small CNN on scikit-learn's bundled digits: 1,797 real images of 8 x 8 pixels.

Data: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddltrace.experiments.workloads.base import Score
from ddltrace.tracer.optional_packages import require_extra

_HELD_OUT_EVERY = 5
_BRIGHTEST = 16.0


class Digits:
    """Three pairs of convolutions with `width`, 2 `width` and 4 `width` channels.

    Parameters grow with the square of the width (32: 0.3 million, 64: 1.1 million, 128: 4.6
    million), and so does computation: per byte sent, deeper layers compute less, as in the
    CNNs that people train. No batch normalization: the exchange of gradients is all that
    travels.

    Attributes:
        model: The CNN; input N x 1 x 8 x 8, output N x 10.
    """

    def __init__(self, *, width: int, batch_size: int, seed: int) -> None:
        """Loads the data and makes the model.

        Args:
            width: Channels of the first pair of convolutions.
            batch_size: Examples per rank and step.
            seed: Of the weights, the split and the order of the data.

        Raises:
            MissingCapabilityError: scikit-learn is not installed.
        """
        self._batch_size = batch_size
        self._seed = seed
        images, labels = _load()
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        held_out = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
        self._train = TensorDataset(images[shuffled[~held_out]], labels[shuffled[~held_out]])
        self._test = TensorDataset(images[shuffled[held_out]], labels[shuffled[held_out]])
        torch.manual_seed(seed)
        self.model: nn.Module = _cnn(width)

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of the training data, epoch after epoch, without an end.

        Raises:
            ValueError: The share is smaller than one batch.
        """
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            self._train, num_replicas=world_size, rank=rank, seed=self._seed
        )
        loader = DataLoader(
            self._train, batch_size=self._batch_size, sampler=sampler, drop_last=True
        )
        if len(loader) == 0:
            raise ValueError(
                f"a batch of {self._batch_size} is more than one rank's share of the data "
                f"({len(sampler)} examples)"
            )
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy, mean over the batch."""
        return functional.cross_entropy(output, target)

    @torch.no_grad()
    def score(self) -> Score:
        """Loss over all training and held-out images, and held-out accuracy."""
        train_images, train_labels = self._train.tensors
        test_images, test_labels = self._test.tensors
        test_output = self.model(test_images)
        return Score(
            train_loss=float(self.loss(self.model(train_images), train_labels)),
            test_loss=float(self.loss(test_output, test_labels)),
            test_accuracy=float((test_output.argmax(1) == test_labels).float().mean()),
        )


def _load() -> tuple[torch.Tensor, torch.Tensor]:
    require_extra("experiments", "the workload digits")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / _BRIGHTEST
    return images, torch.tensor(digits.target, dtype=torch.int64)


def _cnn(width: int) -> nn.Sequential:
    def pair(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.ReLU(),
        ]

    model = nn.Sequential(
        *pair(1, width),
        nn.MaxPool2d(2),
        *pair(width, 2 * width),
        nn.MaxPool2d(2),
        *pair(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )
    # Without normalization layers, PyTorch's default lets the signal fade on its way.
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model
