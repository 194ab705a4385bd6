"""Built-in pace profiles of named GPU models.

NVIDIA publishes the training throughput of its PyTorch ResNet-50 v1.5 on one GPU. A profile takes
the time of a batch of 32 images from it and divides it over the layers in proportion to their
multiplications, two thirds of it for the backward pass, which computes two products of the size
of each layer's forward product. Two approximations: the throughput was measured with larger
batches, and layers of few multiplications are limited by memory, not by arithmetic.

Source: README of PyTorch/Classification/ConvNets/resnet50v1.5 in NVIDIA's DeepLearningExamples,
"Training performance results", PyTorch container 21.03.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.pacing.profile import PaceProfile

_IMAGES: Final = 32
_THROUGHPUT: Final = {
    "v100-resnet50": (367.0, "one V100 16 GB, FP32"),
    "a100-resnet50": (938.0, "one A100 80 GB, TF32"),
    "a100-amp-resnet50": (2470.0, "one A100 80 GB, mixed precision"),
}
"""Images per second, and the device on which they were measured."""

PROFILES: Final = tuple(_THROUGHPUT)
"""Names of the built-in profiles."""

_FORWARD_SHARE: Final = 1 / 3
_STAGES: Final = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))
"""Blocks, width and output size of each stage (He et al., CVPR 2016, table 1)."""


def builtin_profile(name: str) -> PaceProfile:
    """A built-in profile by its name in `PROFILES`."""
    images_per_second, device = _THROUGHPUT[name]
    step_us = _IMAGES / images_per_second * 1e6
    work = _multiplications()
    shares = [layer / sum(work) for layer in work]
    return PaceProfile(
        name=name,
        source=f"ResNet-50 v1.5, {_IMAGES} images at {images_per_second:g} images/s on {device} "
        "(NVIDIA DeepLearningExamples), divided over the layers by multiplications",
        forward_us=tuple(step_us * _FORWARD_SHARE * share for share in shares),
        backward_us=tuple(step_us * (1 - _FORWARD_SHARE) * share for share in reversed(shares)),
    )


def _multiplications() -> list[int]:
    """Multiplications per image of each layer of ResNet-50 v1.5 in order of execution."""
    work = [7 * 7 * 3 * 64 * 112 * 112]
    channels = 64
    for number, (blocks, width, size) in enumerate(_STAGES):
        for block in range(blocks):
            # In version 1.5 the 3 x 3 convolution of a stage's first block has the stride.
            before = size * (2 if block == 0 and number > 0 else 1)
            work.append(channels * width * before**2)
            work.append(9 * width * width * size**2)
            work.append(width * 4 * width * size**2)
            if block == 0:
                work.append(channels * 4 * width * size**2)
            channels = 4 * width
    work.append(channels * 1000)
    return work
