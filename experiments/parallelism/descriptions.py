"""The ways to split a training over ranks: the parallelism axis, before any tensor exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_MICROBATCHES = 1024
_DENSE = ("digits", "vgg", "resnet", "gpt", "moe")


@dataclass(frozen=True)
class Parallelism:
    """A kind of parallelism. Model, examples of a step and loss are those of data parallelism.

    Attributes:
        workloads: The built-in workloads that it can split; None for all.
    """

    workloads: ClassVar[tuple[str, ...] | None] = None


@dataclass(frozen=True)
class TensorParallel(Parallelism):
    """Each rank has a part of the heads and of the hidden features of each layer.

    Two all-reduces in the forward and two in the backward pass of each transformer block.
    """

    workloads: ClassVar[tuple[str, ...] | None] = ("gpt",)


@dataclass(frozen=True)
class Pipeline(Parallelism):
    """Each rank has consecutive layers; a batch passes through in microbatches.

    Attributes:
        microbatches: Parts of the batch of all ranks.
    """

    workloads: ClassVar[tuple[str, ...] | None] = ("gpt",)

    microbatches: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.microbatches <= MAX_MICROBATCHES:
            raise ValueError(f"microbatches must be 1 to {MAX_MICROBATCHES}")


@dataclass(frozen=True)
class GPipe(Pipeline):
    """All forward passes, then all backward passes."""


@dataclass(frozen=True)
class OneForwardOneBackward(Pipeline):
    """A backward pass as soon as one can begin: a stage keeps fewer activations."""


@dataclass(frozen=True)
class ExpertParallel(Parallelism):
    """Each rank has some experts; tokens travel to their expert and back by all-to-all."""

    workloads: ClassVar[tuple[str, ...] | None] = ("moe",)


@dataclass(frozen=True)
class Zero(Parallelism):
    """Each rank keeps a part of the optimizer's state, and broadcasts what it has updated."""

    workloads: ClassVar[tuple[str, ...] | None] = _DENSE


@dataclass(frozen=True)
class Fsdp(Parallelism):
    """Each rank keeps a part of every parameter, gathered for each layer's computation."""

    workloads: ClassVar[tuple[str, ...] | None] = _DENSE
