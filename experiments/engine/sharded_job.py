"""Changes the messages of a job that shards its model with ``fully_shard``."""

from __future__ import annotations

import atexit
import sys
import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.engine.refusal import (
    StrategyRefusedError,
    exit_with_error,
    has_refused,
    refuse,
)
from ddltrace.experiments.engine.update_control import before_step, install_hooks
from ddltrace.experiments.parallelism.descriptions import Fsdp
from ddltrace.tracer.errors import MissingCapabilityError, UsageError


class ShardedJob:
    """Changes every sharded model before its first forward pass.

    A job without one ends before its first optimizer step, or at its end.
    """

    def __init__(self, spec: str, how: Fsdp) -> None:
        self._spec = spec
        self._how = how
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._computed = False

    def install(self) -> None:
        """Observes the forward passes of all modules, of which sharded ones are changed once."""
        nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        before_step.append(self._check_step)
        install_hooks()
        atexit.register(self._check_at_exit)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._computed = True
        # `fully_shard` gives a module a class of its own.
        if type(module).__name__.startswith("FSDP") and module not in self._known:
            self._change(module)

    def _change(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        from ddltrace.experiments.parallelism.sharded_messages import change_messages

        if not isinstance(module, FSDPModule):
            return
        self._known.update(m for m in module.modules() if isinstance(m, FSDPModule))
        try:
            how, say = self._how, partial(refuse, self._spec)
            change_messages(module, how.reduce, how.gather, how.prefetch, say)
        except (MissingCapabilityError, UsageError, ValueError) as error:
            refuse(self._spec, str(error))

    def _check_step(self, optimizer: Optimizer) -> None:
        del optimizer
        if not self._known:
            refuse(self._spec, "the job has no model in fully_shard before its first step")

    def _check_at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None or has_refused():
            return
        if self._computed and not self._known:
            try:
                refuse(self._spec, "the job has no model in fully_shard")
            except StrategyRefusedError:
                exit_with_error()
