"""The training that a description of the parallelism axis asks for."""

from __future__ import annotations

from ddltrace.experiments.parallelism.descriptions import (
    ExpertParallel,
    Fsdp,
    Parallelism,
    Pipeline,
    TensorParallel,
)
from ddltrace.experiments.parallelism.split_training import SplitTraining
from ddltrace.experiments.workloads.base import Workload


def create(how: Parallelism, workload: Workload, learning_rate: float) -> SplitTraining:
    """Splits a workload over all ranks. Collective.

    Args:
        how: The kind of parallelism.
        workload: A workload that `how` can split.
        learning_rate: Learning rate of the workload's optimizer.

    Raises:
        ValueError: The model cannot be split over this number of ranks.
    """
    # Imported here, since each module loads another part of PyTorch.
    if isinstance(how, TensorParallel):
        from ddltrace.experiments.parallelism.tensor_parallel import TensorParallelTraining

        return TensorParallelTraining(workload, learning_rate, how)
    if isinstance(how, Pipeline):
        from ddltrace.experiments.parallelism.pipeline import PipelineTraining

        return PipelineTraining(workload, learning_rate, how)
    if isinstance(how, ExpertParallel):
        from ddltrace.experiments.parallelism.expert_parallel import ExpertParallelTraining

        return ExpertParallelTraining(workload, learning_rate, how)
    from ddltrace.experiments.parallelism.sharded_state import FsdpTraining, ZeroTraining

    if isinstance(how, Fsdp):
        return FsdpTraining(workload, learning_rate, how)
    return ZeroTraining(workload, learning_rate)
