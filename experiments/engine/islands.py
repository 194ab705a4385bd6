"""Hybrid sharding whose groups train alone: they average parameters instead of gradients.

A job that calls ``fully_shard`` with a mesh of two dimensions, (replicate, shard), has as many
replicas of its model as the first dimension has ranks. Each replica is an island here: the job's
calls get the mesh's second dimension alone, so that PyTorch shards, gathers and reduces inside the
island only, and a frequency technique averages the shards along the first dimension.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddltrace.experiments.engine.create_exchange import create_message_exchange
from ddltrace.experiments.engine.pending_averages import PendingAverages
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.update_control import UpdateControl, before_step
from ddltrace.experiments.frequency.frequency import StepContext, StepPolicy
from ddltrace.experiments.frequency.local_sgd import PostLocalSgd
from ddltrace.experiments.messages.trace_marks import name_like
from ddltrace.experiments.strategy.strategy import Strategy

_MESH: Final = (
    "it needs islands, that is fully_shard with a mesh of two dimensions (replicate, shard)"
)


class Islands:
    """Keeps every model of the job inside its islands, and averages between them."""

    def __init__(self, strategy: Strategy) -> None:
        """Takes the strategy.

        Args:
            strategy: Has a frequency technique, whose exchange has the strategy's codec.
        """
        self._strategy = strategy
        self._meshes: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Replaces `fully_shard` wherever a module refers to it."""
        original: Any = fsdp.fully_shard

        @functools.wraps(original)
        def fully_shard(module: Any, *, mesh: Any = None, **options: Any) -> Any:
            self._check_call(mesh, options)
            sharded = original(module, mesh=_island_of(mesh), **options)
            for each in module if isinstance(module, Sequence) else [module]:
                self._meshes[each] = mesh
            return sharded

        for loaded in list(sys.modules.values()):
            for name, value in list(getattr(loaded, "__dict__", {}).items()):
                if value is original:
                    setattr(loaded, name, fully_shard)
        before_step.append(self._before_step)

    def take(self, root: nn.Module) -> None:
        """Lets a sharded model train alone on each island. Collective.

        Args:
            root: The model, before its first forward pass.
        """
        modules = [module for module in root.modules() if isinstance(module, fsdp.FSDPModule)]
        if not all(module in self._meshes for module in modules):
            refuse(
                self._strategy.spec,
                "the job calls fully_shard by a reference from before its process group, which the "
                "strategy cannot replace; call it by the name that the job imports",
            )
        meshes = [self._meshes[module] for module in modules]
        groups = {mesh.get_group(0) for mesh in meshes}
        if len(groups) > 1:
            refuse(self._strategy.spec, "parts of the model have islands of different ranks")
        parameters = [
            (name, parameter)
            for name, parameter in root.named_parameters()
            if parameter.requires_grad and isinstance(parameter, DTensor)
        ]
        if any(p.device.type != meshes[0].device_type for _, p in parameters):
            refuse(
                self._strategy.spec,
                "the job keeps its parameters on another device than that of its mesh (an "
                "offload_policy), where islands cannot average them",
            )
        self._models[root] = _Model(self._strategy, modules, parameters, groups.pop())

    def begin_pass(self, root: nn.Module) -> None:
        """A forward pass of a model begins."""
        if torch.is_grad_enabled():
            self._models[root].gradients.backward_passes += 1

    def settle(self) -> None:
        """Waits for what is in flight."""
        for model in self._models.values():
            model.updates.end()

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has updated every model."""
        return all(model.updates.steps for model in self._models.values())

    def _check_call(self, mesh: Any, options: dict[str, Any]) -> None:
        spec = self._strategy.spec
        if mesh is None or mesh.ndim != 2:
            given = "no mesh" if mesh is None else f"a mesh of {mesh.ndim} dimensions"
            refuse(spec, f"{_MESH}, and the job gives {given}")
        if options.get("dp_mesh_dims") is not None:
            refuse(spec, f"{_MESH}, and the job gives dp_mesh_dims=")
        if type(options.get("reshard_after_forward")) is int:
            refuse(spec, "the job gives a number of ranks as reshard_after_forward=")

    def _before_step(self, optimizer: Optimizer) -> None:
        del optimizer
        for model in self._models.values():
            model.refer_to_shards()


class _Model:
    """One model of the job.

    Attributes:
        gradients: Counts its backward passes.
        updates: Controls its optimizer's steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        modules: Sequence[Any],
        parameters: Sequence[tuple[str, DTensor]],
        group: dist.ProcessGroup,
    ) -> None:
        """Creates the policy. Collective.

        Args:
            strategy: Its frequency technique decides when parameters are averaged.
            modules: All modules of the model to which `fully_shard` was applied.
            parameters: Their trainable parameters by name.
            group: The ranks of all islands that have the same shards.
        """
        assert strategy.frequency is not None
        self._shards = [(_shard(parameter), parameter) for _, parameter in parameters]
        names = [name for name, _ in parameters]
        self._policy = strategy.frequency.policy(
            StepContext(
                strategy.spec,
                list(zip(names, [shard for shard, _ in self._shards], strict=True)),
                group,
                group,
                lambda: create_message_exchange(strategy, group),
                encodes=strategy.encodes,
                keeps_residuals=strategy.feedback is not None,
            )
        )
        self.gradients = _ReducedByFsdp(strategy.spec)
        self.updates = UpdateControl(
            strategy.spec,
            [parameter for _, parameter in parameters],  # type: ignore[misc]
            self.gradients,
            self._policy,
            None,
        )
        if isinstance(strategy.frequency, PostLocalSgd):
            for module in modules:
                module.set_all_reduce_hook(functools.partial(_average, self._policy, group))

    def refer_to_shards(self) -> None:
        """Lets the policy see the parameters' present memory, which loading may have replaced."""
        with torch.no_grad():
            for shard, parameter in self._shards:
                shard.data = parameter.to_local()


class _ReducedByFsdp:
    """What an update has to know of gradients that FSDP has reduced already."""

    waits_by_layer = False
    passes_with_gradients = 1  # FSDP reduces the gradients of all passes

    def __init__(self, spec: str) -> None:
        self.backward_passes = 0
        self.pending = PendingAverages([], spec)

    def left_behind(self) -> str:
        """Nothing."""
        return ""

    def take_momentum(self, momentum: float) -> None:
        """No codec encodes gradients."""
        del momentum


def _island_of(mesh: DeviceMesh) -> DeviceMesh:
    """The second dimension of a mesh."""
    if mesh.mesh_dim_names is None:
        return DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)
    return mesh[mesh.mesh_dim_names[1]]


def _shard(parameter: DTensor) -> nn.Parameter:
    """This rank's part of a parameter, in the parameter's memory."""
    with torch.no_grad():
        shard = nn.Parameter(parameter.to_local(), requires_grad=False)
    name_like(shard, parameter)
    return shard


def _average(policy: StepPolicy, group: dist.ProcessGroup, gradients: torch.Tensor) -> None:
    """Averages what an island has reduced over the islands, where the policy says so.

    Args:
        gradients: In FSDP's layout, which is the same on all ranks of the group.
    """
    if policy.exchanges_gradients():
        gradients.div_(group.size())
        dist.all_reduce(gradients, group=group)
        if gradients.is_cuda:
            # They were allocated on the stream of the reduce-scatter.
            gradients.record_stream(torch.cuda.current_stream())
