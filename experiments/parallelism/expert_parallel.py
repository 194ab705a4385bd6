"""Expert parallelism of the mixture of experts: tokens travel to the rank of their expert."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.collectives.over_architecture import find_hosts
from ddltrace.experiments.parallelism.rank_functions import exchange_rows
from ddltrace.experiments.parallelism.split_training import SplitTraining, gather_states
from ddltrace.experiments.parallelism.token_exchange import (
    DirectExchange,
    HierarchicalExchange,
    TokenExchange,
)
from ddltrace.experiments.workloads.base import Workload
from ddltrace.experiments.workloads.moe import Experts, MoeModel
from ddltrace.experiments.workloads.sizes import EXPERTS


class ExpertParallelTraining(SplitTraining):
    """Experts are divided over the ranks; all else is data parallel."""

    def __init__(
        self,
        workload: Workload,
        learning_rate: float,
        *,
        capacity: float | None = None,
        hierarchical: bool = False,
        ranks_per_host: int | None = None,
    ) -> None:
        """Divides the experts. Collective.

        Args:
            workload: A workload whose model is a `MoeModel`.
            learning_rate: Learning rate of the workload's optimizer.
            capacity, ranks_per_host: As of `descriptions.ExpertParallel`.
            hierarchical: Whether tokens travel inside each host, then between hosts.
        """
        super().__init__(workload)
        assert isinstance(workload.model, MoeModel)
        self._model = workload.model
        self._whole = [block.experts for block in self._model.blocks]
        exchange: TokenExchange = DirectExchange()
        if hierarchical:
            world = dist.group.WORLD
            assert world is not None
            exchange = HierarchicalExchange(find_hosts(world, ranks_per_host))
        for block in self._model.blocks:
            block.experts = _OwnExperts(block.experts, exchange, capacity)
        self._divided = [
            parameter for block in self._model.blocks for parameter in block.experts.parameters()
        ]
        own = {id(parameter) for parameter in self._divided}
        ddp: Any = DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(
            self._model,
            [name for name, value in self._model.named_parameters() if id(value) in own],
        )
        self._trained = DistributedDataParallel(self._model)
        self._optimizer = workload.optimizer(learning_rate)

    def _before_update(self) -> None:
        """An expert's gradient has the tokens of all ranks in it already."""
        for parameter in self._divided:
            if parameter.grad is not None:
                parameter.grad.div_(self.ranks)

    def join(self) -> None:
        """Brings all experts to all ranks, and reports which tokens they have had."""
        self._report()
        for block, whole in zip(self._model.blocks, self._whole, strict=True):
            part: Any = block.experts
            each = EXPERTS // self.ranks
            for rank, state in enumerate(gather_states(part.own.state_dict())):
                for key, value in state.items():
                    number, _, name = key.partition(".")
                    index = rank * each + int(number)
                    whole.layers[index].get_parameter(name).data.copy_(value)
            block.experts = whole

    def _report(self) -> None:
        """Reports the tokens of all steps by block, the rank that has them, and expert."""
        own = [(block.experts.tokens, block.experts.dropped) for block in self._model.blocks]
        gathered: list[Any] = [None] * self.ranks
        dist.all_gather_object(gathered, own)
        tokens, dropped = (
            torch.stack([torch.stack([block[part] for block in each]) for each in gathered], 1)
            for part in (0, 1)
        )
        share = float(dropped.sum() / tokens.sum().clamp(min=1))
        kept = (tokens - dropped).sum(1)  # by block and expert
        loads = kept.view(len(kept), self.ranks, -1).sum(2).double()  # by block and rank
        imbalance = float((loads.amax(1) / loads.mean(1).clamp(min=1)).mean())
        self.findings["experts"] = {
            "dropped_share": share,
            "imbalance": imbalance,
            "tokens": tokens.tolist(),
            "dropped": dropped.tolist(),
        }


class _OwnExperts(nn.Module):
    """This rank's experts, in place of all of them.

    Attributes:
        own: The experts.
        tokens: Tokens of this rank for each expert, of all ranks, in all steps.
        dropped: How many of them were dropped.
    """

    def __init__(self, experts: Experts, exchange: TokenExchange, capacity: float | None) -> None:
        super().__init__()
        rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._each = EXPERTS // self._ranks
        self._exchange, self._capacity = exchange, capacity
        self.own = nn.ModuleList(experts.layers[rank * self._each : (rank + 1) * self._each])
        self.tokens = torch.zeros(EXPERTS, dtype=torch.int64)
        self.dropped = torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """As of `Experts`; zero for a dropped token."""
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        self.tokens += counts
        if self._capacity is not None:
            # 1.1 * 40 / 4 is 11.000000000000002.
            most = math.ceil(self._capacity * len(chosen) / EXPERTS - 1e-9)
            begins = counts.cumsum(0) - counts
            place = torch.arange(len(order)) - begins[chosen[order]]
            order = order[place < most]  # the first ones of each expert
            self.dropped += (counts - most).clamp(min=0)
            counts = counts.clamp(max=most)
        plan = self._exchange.plan(counts)
        arrived = exchange_rows(tokens[order], plan.there, plan.back)
        # From each rank come the tokens of the first own expert, then those of the next.
        each = torch.arange(self._each).repeat(self._ranks)
        expert_of = each.repeat_interleave(plan.received.reshape(-1))
        made = torch.zeros_like(arrived)
        for number, expert in enumerate(self.own):
            places = (expert_of == number).nonzero().view(-1)
            made = made.index_copy(0, places, expert(arrived[places]))
        returned = exchange_rows(made, plan.back, plan.there)
        return torch.zeros_like(tokens).index_copy(0, order, returned)
