"""Pipeline parallelism of the GPT, by PyTorch's own schedules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ddltrace.experiments.parallelism.split_training import SplitTraining, gather_states
from ddltrace.experiments.workloads.base import Workload
from ddltrace.experiments.workloads.gpt import GptModel


class PipelineTraining(SplitTraining):
    """Rank i has the i-th part of the layers; the last one knows the loss."""

    needs_all_examples = True

    def __init__(
        self, workload: Workload, learning_rate: float, microbatches: int, *, forward_first: bool
    ) -> None:
        """Divides the layers.

        Args:
            workload: A workload whose model is a `GptModel`.
            learning_rate: Learning rate of the workload's optimizer.
            microbatches: Equally large parts of each batch.
            forward_first: Whether all forward passes come before all backward passes.
        """
        super().__init__(workload)
        assert isinstance(workload.model, GptModel)
        self._model = workload.model
        units = self._model.units()
        first = self.rank * len(units) // self.ranks
        last = (self.rank + 1) * len(units) // self.ranks
        self._own = dict(units[first:last])
        part = nn.Sequential(*self._own.values())
        stage = PipelineStage(part, self.rank, self.ranks, torch.device("cpu"))
        kind = ScheduleGPipe if forward_first else Schedule1F1B
        self._schedule = kind(stage, microbatches, loss_fn=workload.loss)
        kind_of_optimizer: Any = type(workload.optimizer(learning_rate))
        self._optimizer = kind_of_optimizer(part.parameters(), lr=learning_rate)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """A step like that of one rank with all examples."""
        self._optimizer.zero_grad()
        arguments = (inputs,) if self.rank == 0 else ()
        losses: list[torch.Tensor] = []
        if self.rank == self.ranks - 1:
            self._schedule.step(*arguments, target=targets, losses=losses)
        else:
            self._schedule.step(*arguments)
        self._optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    def join(self) -> None:
        """Brings all layers to all ranks."""
        own = {
            f"{name}.{key}": value
            for name, unit in self._own.items()
            for key, value in unit.state_dict().items()
        }
        dist.barrier()
        joined = {key: value for state in gather_states(own) for key, value in state.items()}
        for name, unit in self._model.units():
            unit.load_state_dict({key: joined[f"{name}.{key}"] for key in unit.state_dict()})
