"""Expert parallelism of the mixture of experts: tokens travel to the rank of their expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.parallelism.rank_functions import exchange_rows
from ddltrace.experiments.parallelism.split_training import SplitTraining, gather_states, train_step
from ddltrace.experiments.workloads.base import Workload
from ddltrace.experiments.workloads.moe import Experts, MoeModel
from ddltrace.experiments.workloads.sizes import EXPERTS


class ExpertParallelTraining(SplitTraining):
    """Experts are divided over the ranks; all else is data parallel."""

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        """Divides the experts.

        Args:
            workload: A workload whose model is a `MoeModel`.
            learning_rate: Learning rate of the workload's optimizer.
        """
        super().__init__(workload)
        assert isinstance(workload.model, MoeModel)
        self._model = workload.model
        self._whole = [block.experts for block in self._model.blocks]
        for block in self._model.blocks:
            block.experts = _OwnExperts(block.experts, self.rank, self.ranks)
        self._divided = [
            parameter for block in self._model.blocks for parameter in block.experts.parameters()
        ]
        own = {id(parameter) for parameter in self._divided}
        ddp: Any = DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(
            self._model,
            [name for name, value in self._model.named_parameters() if id(value) in own],
        )
        self._ddp = DistributedDataParallel(self._model)
        self._optimizer = workload.optimizer(learning_rate)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A step; an expert's gradient has the tokens of all ranks in it already."""
        return train_step(
            self.workload,
            self._ddp,
            self._optimizer,
            inputs,
            targets,
            before_update=self._average_gradients,
        )

    def _average_gradients(self) -> None:
        for parameter in self._divided:
            if parameter.grad is not None:
                parameter.grad.div_(self.ranks)

    def join(self) -> None:
        """Brings all experts to all ranks."""
        for block, whole in zip(self._model.blocks, self._whole, strict=True):
            part: Any = block.experts
            each = EXPERTS // self.ranks
            for rank, state in enumerate(gather_states(part.own.state_dict())):
                for key, value in state.items():
                    number, _, name = key.partition(".")
                    index = rank * each + int(number)
                    whole.layers[index].get_parameter(name).data.copy_(value)
            block.experts = whole


class _OwnExperts(nn.Module):
    """This rank's experts, in place of all of them."""

    def __init__(self, experts: Experts, rank: int, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._each = EXPERTS // ranks
        self.own = nn.ModuleList(experts.layers[rank * self._each : (rank + 1) * self._each])

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What each token's expert makes of it; arguments as those of `Experts`."""
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        sent = counts.view(self._ranks, -1).sum(1).tolist()
        by_rank = incoming.view(self._ranks, self._each)
        received = by_rank.sum(1).tolist()
        arrived = exchange_rows(tokens[order], sent, received)
        # From each rank come the tokens of the first own expert, then those of the next.
        expert_of = (
            torch.arange(self._each).repeat(self._ranks).repeat_interleave(by_rank.reshape(-1))
        )
        made = torch.zeros_like(arrived)
        for number, expert in enumerate(self.own):
            places = (expert_of == number).nonzero().view(-1)
            made = made.index_copy(0, places, expert(arrived[places]))
        returned = exchange_rows(made, received, sent)
        return torch.zeros_like(tokens).index_copy(0, order, returned)
