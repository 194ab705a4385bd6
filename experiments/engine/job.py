"""Applies a strategy to a job without changes to its code."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.autograd as distributed_autograd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddltrace.experiments.engine.job_end import at_job_end
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.take_over import TakenOver
from ddltrace.experiments.engine.update_control import before_step, install_hooks
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.strategy import Strategy


class JobStrategy:
    """Takes over every model that the job wraps in DistributedDataParallel.

    A job to which the strategy cannot be applied ends before its first optimizer step, or before
    its second backward pass if it has no optimizer.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._on_reducer = strategy.runs_on_reducer
        self._models: list[TakenOver] = []
        self._wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._found = False
        self._passes = 0
        self._depth = 0
        self._computed = False

    def install(self) -> None:
        """Patches DistributedDataParallel; existing models are not changed."""
        ddp: Any = DistributedDataParallel
        ddp.__init__ = self._wrapping(ddp.__init__)
        # A copied or unpickled wrapper builds its reducer here.
        ddp.__setstate__ = self._wrapping(ddp.__setstate__)
        for name in ("register_comm_hook", "_register_builtin_comm_hook", "_register_fused_optim"):
            if hasattr(ddp, name):
                setattr(ddp, name, self._refusing(name, getattr(ddp, name)))
        at_job_end(self._settle, self._check_end)
        before_step.append(self._check_step)
        install_hooks()
        ways: list[tuple[Any, str]] = [(torch.autograd, "backward"), (torch.autograd, "grad")]
        if hasattr(distributed_autograd, "backward"):
            ways.append((distributed_autograd, "backward"))
        for owner, name in ways:
            setattr(owner, name, self._counting(getattr(owner, name), leaves=name == "backward"))

    def _counting(self, original: Any, *, leaves: bool) -> Any:
        """Counts backward passes of a job that has no model in DistributedDataParallel yet.

        Args:
            original: The function that runs the pass.
            leaves: Whether it leaves gradients in the parameters, and so makes a step.
        """

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._found or self._depth:
                return original(*args, **kwargs)
            if leaves and self._passes:
                self._refuse_alone("before its second backward pass")
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            self._passes += leaves
            self._computed = True
            return result

        return run

    def _wrapping(self, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def build(ddp: Any, *args: Any, **kwargs: Any) -> None:
            if "bucket_cap_mb" in signature.parameters:
                bound = signature.bind(ddp, *args, **kwargs)
                self._end_former(bound.arguments["module"])
                self._set_bucket_size(bound.arguments)
                args, kwargs = bound.args[1:], bound.kwargs
            original(ddp, *args, **kwargs)
            # A subclass that calls two constructors is one model.
            if any(model.ddp is ddp for model in self._models):
                return
            self._found = True
            self._wrapped.add(ddp)
            if not self._on_reducer:
                self._models.append(TakenOver(ddp, self._strategy))

        return build

    def _end_former(self, module: nn.Module) -> None:
        """Ends the strategy in earlier wrappers of a module that the job wraps again.

        Otherwise both wrappers would act on every step of the optimizer.
        """
        for model in [model for model in self._models if model.ddp.module is module]:
            self._models.remove(model)
            model.close()

    def _set_bucket_size(self, arguments: dict[str, Any]) -> None:
        schedule = self._strategy.schedule
        if self._on_reducer and isinstance(schedule, DdpBuckets) and schedule.bucket_mb is not None:
            arguments["bucket_cap_mb"] = schedule.bucket_mb

    def _refusing(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def register(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if ddp in self._wrapped:
                refuse(
                    self._strategy.spec,
                    f"the job registers a communication hook of its own ({name}); "
                    "remove it, or run the job without --strategy",
                )
            return original(ddp, *args, **kwargs)

        return register

    def _settle(self) -> None:
        for model in self._models:
            model.updates.end()

    def _check_end(self) -> None:
        """What was not exchanged until now will not be."""
        if not dist.is_initialized():
            return  # checked before its end
        if self._computed and not self._found:
            self._refuse_alone("")
        for model in self._models:
            model.updates.check_end()

    def _refuse_alone(self, when: str) -> NoReturn:
        refuse(
            self._strategy.spec,
            f"the job has no model in DistributedDataParallel {when}".rstrip(),
        )

    def _check_step(self, optimizer: Optimizer) -> None:
        """Before every optimizer step: ends a job without a model to which the strategy applies."""
        if self._found:
            return
        used = _in_place_of_ddp(optimizer)
        if used:
            refuse(
                self._strategy.spec,
                f"the job {used}; strategies apply to DistributedDataParallel, and those with fsdp "
                "(fsdp:reduce=fp8, fsdp+diloco) to fully_shard",
            )
        self._refuse_alone("before its first optimizer step")


def _in_place_of_ddp(optimizer: Optimizer) -> str:
    """What a job without DistributedDataParallel does instead; empty if that is not known."""
    # Set by deepspeed.initialize: the package alone may have been imported by another one.
    if getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None:
        return "trains with DeepSpeed"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(
        getattr(p, "_is_flat_param", False) or hasattr(p, "_fsdp_flattened") for p in parameters
    ):
        return "shards its model with FSDP"
    if any(type(p).__name__ == "DTensor" for p in parameters):
        return "shards its parameters with FSDP or tensor parallelism"
    return ""
