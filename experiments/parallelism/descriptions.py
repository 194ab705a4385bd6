"""The ways to split a training over ranks: the parallelism axis, before any tensor exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ddltrace.experiments.technique import technique
from ddltrace.experiments.workloads.sizes import EXPERTS, HEADS, LAYERS

if TYPE_CHECKING:
    from torch import nn

    from ddltrace.experiments.parallelism.sharded_messages import Refuse
    from ddltrace.experiments.parallelism.split_training import SplitTraining
    from ddltrace.experiments.workloads.base import Workload

MAX_MICROBATCHES = 1024
_MAX_PREFETCH = 64
_MAX_CAPACITY = 1024
_DENSE = ("digits", "vgg", "resnet", "gpt", "moe")


@dataclass(frozen=True)
class Parallelism(ABC):
    """A kind of parallelism. Model, examples of a step and loss are those of data parallelism.

    Attributes:
        workloads: The built-in workloads that it can split; None for all.
    """

    workloads: ClassVar[tuple[str, ...] | None] = None

    @abstractmethod
    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Splits a workload over all ranks; loads the part of PyTorch that does it. Collective.

        Args:
            workload: A workload that it can split, for which `check_ranks` has passed.
            learning_rate: Learning rate of the workload's optimizer.
        """

    def check_ranks(self, ranks: int) -> None:  # noqa: B027 - some split any number
        """Checks whether a model can be split over so many ranks.

        Raises:
            ValueError: It cannot.
        """

    def check_examples(self, examples: int) -> None:  # noqa: B027 - most split any batch
        """Checks whether a batch can be split.

        Args:
            examples: The examples of all ranks in one step.

        Raises:
            ValueError: It cannot.
        """


@technique(
    "parallelism",
    "tensor",
    "each rank has a part of each layer",
    "Megatron-LM, arXiv 1909.08053",
    needs=("--workload gpt",),
)
@dataclass(frozen=True)
class TensorParallel(Parallelism):
    """Each rank has a part of the heads and of the hidden features of each layer.

    Two all-reduces in the forward and two in the backward pass of each transformer block.
    """

    workloads: ClassVar[tuple[str, ...] | None] = ("gpt",)

    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Divides the blocks."""
        from ddltrace.experiments.parallelism.tensor_parallel import TensorParallelTraining

        return TensorParallelTraining(workload, learning_rate)

    def check_ranks(self, ranks: int) -> None:
        """Heads are divided evenly."""
        if HEADS % ranks:
            raise ValueError(f"{HEADS} heads cannot be divided evenly over {ranks} ranks")


@dataclass(frozen=True)
class Pipeline(Parallelism):
    """Each rank has consecutive layers; a batch passes through in microbatches.

    Attributes:
        forward_first: Whether all forward passes come before all backward passes.
        microbatches: Parts of the batch of all ranks.
    """

    workloads: ClassVar[tuple[str, ...] | None] = ("gpt",)

    forward_first: ClassVar[bool]
    microbatches: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.microbatches <= MAX_MICROBATCHES:
            raise ValueError(f"microbatches must be 1 to {MAX_MICROBATCHES}")

    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Divides the layers."""
        from ddltrace.experiments.parallelism.pipeline import PipelineTraining

        return PipelineTraining(
            workload, learning_rate, self.microbatches, forward_first=self.forward_first
        )

    def check_ranks(self, ranks: int) -> None:
        """Each rank has a part of the model: the embedding, blocks, the output."""
        parts = LAYERS + 2
        if parts < ranks:
            raise ValueError(f"{parts} parts cannot be divided over {ranks} ranks")

    def check_examples(self, examples: int) -> None:
        """Microbatches are equally large."""
        if examples % self.microbatches:
            raise ValueError(
                f"the batch of all ranks, {examples} examples, cannot be divided evenly into "
                f"{self.microbatches} microbatches"
            )


@technique(
    "parallelism",
    "gpipe",
    "each rank has consecutive layers; all forward, then all backward passes",
    "GPipe, NeurIPS 2019",
    needs=("--workload gpt",),
)
@dataclass(frozen=True)
class GPipe(Pipeline):
    """All forward passes, then all backward passes."""

    forward_first: ClassVar[bool] = True


@technique(
    "parallelism",
    "1f1b",
    "each rank has consecutive layers; backward passes begin as soon as they can",
    "PipeDream-Flush, ICML 2021",
    needs=("--workload gpt",),
)
@dataclass(frozen=True)
class OneForwardOneBackward(Pipeline):
    """A backward pass as soon as one can begin: a stage keeps fewer activations."""

    forward_first: ClassVar[bool] = False


@technique(
    "parallelism",
    "expert",
    "each rank has some experts; tokens travel by all-to-all",
    "GShard, ICLR 2021; capacity: Switch Transformer, JMLR 2022; hierarchical: HetuMoE, arXiv "
    "2203.14685",
    needs=("--workload moe",),
)
@dataclass(frozen=True)
class ExpertParallel(Parallelism):
    """Each rank has some experts; tokens travel to their expert and back by all-to-all.

    Attributes:
        capacity: An expert takes at most this many times its even share of the tokens of each rank,
            rounded up; the others are dropped: they pass by the experts. By default it takes all.
        exchange: ``direct``, a message from each rank to each other, or ``hierarchical``, inside
            each host and one message between each two hosts.
        ranks_per_host: For ``hierarchical``: consecutive ranks that count as one host; by default
            those that have the same host name.
    """

    workloads: ClassVar[tuple[str, ...] | None] = ("moe",)

    capacity: float | None = None
    exchange: Literal["direct", "hierarchical"] = "direct"
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None and not 0 < self.capacity <= _MAX_CAPACITY:
            raise ValueError(f"capacity must be more than 0 and at most {_MAX_CAPACITY}")
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise ValueError("ranks_per_host must be at least 1")
        if self.ranks_per_host is not None and self.exchange != "hierarchical":
            raise ValueError("ranks_per_host needs exchange=hierarchical")

    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Divides the experts."""
        from ddltrace.experiments.parallelism.expert_parallel import ExpertParallelTraining

        return ExpertParallelTraining(
            workload,
            learning_rate,
            capacity=self.capacity,
            hierarchical=self.exchange == "hierarchical",
            ranks_per_host=self.ranks_per_host,
        )

    def check_ranks(self, ranks: int) -> None:
        """Experts are divided evenly."""
        if EXPERTS % ranks:
            raise ValueError(f"{EXPERTS} experts cannot be divided evenly over {ranks} ranks")


@technique(
    "parallelism",
    "zero",
    "each rank has a part of the optimizer's state",
    "ZeRO stage 1, SC 2020",
    needs=("a built-in workload",),
)
@dataclass(frozen=True)
class Zero(Parallelism):
    """Each rank keeps a part of the optimizer's state, and broadcasts what it has updated."""

    workloads: ClassVar[tuple[str, ...] | None] = _DENSE

    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Divides the optimizer's state."""
        from ddltrace.experiments.parallelism.sharded_state import ZeroTraining

        return ZeroTraining(workload, learning_rate)


Encoding = Literal["none", "bf16", "fp8", "int8", "int4"]
"""How messages of FSDP are encoded: by the codec of this name, or not at all."""


@technique(
    "parallelism",
    "fsdp",
    "each rank has a part of every parameter, gathered layer by layer",
    "ZeRO stage 3, SC 2020; PyTorch FSDP, VLDB 2023; encodings: ZeRO++, arXiv 2306.10209",
    needs=(
        "alone a built-in workload, with parameters or beside a frequency technique a job with "
        "fully_shard",
    ),
)
@dataclass(frozen=True)
class Fsdp(Parallelism):
    """Each rank keeps a part of every parameter, gathered for each layer's computation.

    With parameters it changes the messages of a job that calls ``fully_shard`` itself. Beside a
    frequency technique, the groups of a job with hybrid sharding train alone, and the technique
    averages their parameters.

    Attributes:
        reduce: Gradients are encoded, sent to the rank that keeps their part, and added up there in
            float32, in place of the reduce-scatter. Between several hosts in two levels, as
            ZeRO++ does: inside each host, then, encoded again, between hosts.
        gather: Each rank encodes its part of the parameters for the all-gather.
        prefetch: How many layers ahead parameters are gathered, in forward and in backward; 0
            leaves that to PyTorch.
        ranks_per_host: Consecutive ranks that count as one host for `reduce`; by default those that
            have the same host name.
    """

    workloads: ClassVar[tuple[str, ...] | None] = _DENSE

    reduce: Encoding = "none"
    gather: Encoding = "none"
    prefetch: int = 0
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None and (self.ranks_per_host < 1 or self.reduce == "none"):
            raise ValueError("ranks_per_host must be at least 1, and needs reduce=")
        if not 0 <= self.prefetch <= _MAX_PREFETCH:
            raise ValueError(f"prefetch must be 0 to {_MAX_PREFETCH}")

    def split(self, workload: Workload, learning_rate: float) -> SplitTraining:
        """Divides the parameters."""
        from ddltrace.experiments.parallelism.sharded_messages import raise_error
        from ddltrace.experiments.parallelism.sharded_state import FsdpTraining

        training = FsdpTraining(workload, learning_rate)
        self.change_messages(workload.model, raise_error)
        return training

    def change_messages(self, model: nn.Module, refuse: Refuse) -> None:
        """Changes the messages of a model, before its first forward pass.

        Args:
            model: A model to which ``fully_shard`` was applied.
            refuse: Called for a message that cannot be encoded.

        Raises:
            MissingCapabilityError: This version of PyTorch has no custom messages of FSDP.
        """
        from ddltrace.experiments.parallelism.sharded_messages import change_messages

        change_messages(
            model,
            reduce=self.reduce,
            gather=self.gather,
            prefetch=self.prefetch,
            ranks_per_host=self.ranks_per_host,
            refuse=refuse,
        )
