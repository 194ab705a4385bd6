"""ZeRO and FSDP: data parallelism whose training state is divided over the ranks."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.parallelism.split_training import SplitTraining
from ddltrace.experiments.workloads.base import Workload


class ZeroTraining(SplitTraining):
    """Gradients as with DDP; each rank updates some parameters and broadcasts them."""

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        """Divides the optimizer's state.

        Args:
            workload: The workload to train.
            learning_rate: Learning rate of the workload's optimizer.
        """
        super().__init__(workload)
        like = workload.optimizer(learning_rate)
        settings = {key: value for key, value in like.defaults.items() if key in _SETTINGS}
        self._trained = DistributedDataParallel(workload.model)
        self._optimizer = ZeroRedundancyOptimizer(
            workload.model.parameters(), optimizer_class=type(like), **settings
        )

    def join(self) -> None:
        """Every rank has the whole model."""


class FsdpTraining(SplitTraining):
    """Every child of the model with parameters, and each block, is gathered when it computes."""

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        """Divides the parameters.

        Args:
            workload: The workload to train.
            learning_rate: Learning rate of the workload's optimizer.
        """
        super().__init__(workload)
        self._whole = copy.deepcopy(workload.model)
        mesh = init_device_mesh("cpu", (self.ranks,))
        for child in workload.model.children():
            for layer in child if isinstance(child, torch.nn.ModuleList) else [child]:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
        fully_shard(workload.model, mesh=mesh)
        self._optimizer = workload.optimizer(learning_rate)

    def join(self) -> None:
        """Gathers every parameter, into a model that is not divided."""
        gathered = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.workload.model.state_dict().items()
        }
        self._whole.load_state_dict(gathered)
        self.workload.model = self._whole


_SETTINGS = frozenset(
    {"lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "amsgrad"}
)
