"""Changes the messages of a job that shards its model with ``fully_shard``."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.engine.job_end import at_job_end
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.update_control import before_step, install_hooks
from ddltrace.experiments.parallelism.descriptions import Fsdp
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.tracer.errors import MissingCapabilityError, UsageError


class ShardedJob:
    """Changes every sharded model before its first forward pass.

    A job without one ends before its first optimizer step, or at its end.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._spec = strategy.spec
        self._how = strategy.parallelism
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._computed = False
        self._found = False
        self._islands = None
        if strategy.frequency is not None:
            # Only such a job needs them: they load FSDP.
            from ddltrace.experiments.engine.islands import Islands

            self._islands = Islands(strategy)

    def install(self) -> None:
        """Observes the forward passes of all modules, of which sharded ones are changed once."""
        nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        before_step.append(self._check_step)
        install_hooks()
        at_job_end(self._settle, self._check_end)
        if self._islands is not None:
            self._islands.install()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._computed = True
        # `fully_shard` gives a module a class of its own.
        if not type(module).__name__.startswith("FSDP"):
            return
        if module not in self._known:
            self._change(module)
        if self._islands is not None and module in self._roots:
            self._islands.begin_pass(module)

    def _change(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not isinstance(module, FSDPModule):
            return
        self._known.update(m for m in module.modules() if isinstance(m, FSDPModule))
        self._roots.add(module)
        self._found = True
        assert isinstance(self._how, Fsdp)
        try:
            self._how.change_messages(module, partial(refuse, self._spec))
            if self._islands is not None:
                self._islands.take(module)
        except (MissingCapabilityError, UsageError, ValueError) as error:
            refuse(self._spec, str(error))

    def _check_step(self, optimizer: Optimizer) -> None:
        del optimizer
        # A step before any forward pass makes an optimizer's state, for a checkpoint to be loaded.
        if self._computed and not self._found:
            refuse(self._spec, "the job has no model in fully_shard before its first step")

    def _settle(self) -> None:
        if self._islands is not None:
            self._islands.settle()

    def _check_end(self) -> None:
        if not self._computed:
            return
        if not self._found:
            refuse(self._spec, "the job has no model in fully_shard")
        if self._islands is not None and not self._islands.has_updated:
            refuse(self._spec, "no optimizer of PyTorch has updated the job's model")
