"""Replaces DistributedDataParallel's reducer by a strategy.

All else of the module is unchanged: its forward, its ``module.`` prefix, ``no_sync``, and the
broadcast of buffers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from ddltrace.experiments.engine.create_exchange import create_message_exchange
from ddltrace.experiments.engine.factor_exchange import FactorExchange
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.model_exchange import ModelExchange
from ddltrace.experiments.engine.one_step_delay import OneStepDelay
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.engine.server_updates import ServerUpdates
from ddltrace.experiments.engine.update_control import UpdateControl
from ddltrace.experiments.frequency.frequency import EveryStep, StepContext, StepPolicy
from ddltrace.experiments.frequency.local_sgd import PostLocalSgd
from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.messages.message_exchange import AllReduce, MessageExchange
from ddltrace.experiments.observation.notes import report_restriction
from ddltrace.experiments.optimizer_rules.muon import outer_weights
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.strategy.job_checks import refused_ranks, require_packages
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.transports.backends.register import backend_of
from ddltrace.tracer.errors import MissingCapabilityError


class TakenOver:
    """A strategy that has replaced the reducer of one model.

    Attributes:
        ddp: The model's DistributedDataParallel.
        exchange: Averages its gradients.
        updates: Controls its optimizer's steps.
    """

    def __init__(self, ddp: DistributedDataParallel, strategy: Strategy) -> None:
        """Replaces the reducer. Collective.

        Args:
            ddp: A model that was just wrapped.
            strategy: A strategy for which `runs_on_reducer` is false.

        Raises:
            StrategyRefusedError: The strategy cannot be applied to the model.
        """
        _check(ddp, strategy)
        _check_transport(ddp, strategy)
        self.ddp = ddp
        group = ddp.process_group
        trainable = {id(p) for p in ddp._module_parameters if p.requires_grad}
        parameters = [(n, p) for n, p in ddp.module.named_parameters() if id(p) in trainable]
        if strategy.place in ("servers", "peers"):
            _stop_broadcasts(ddp, strategy)
        try:
            messages = _group_for_messages(strategy, ddp)
            # What the frequency exchanges goes over the strategy's transport, too.
            carried_by = group if strategy.transport is None else messages
            policy = create_step_policy(
                strategy,
                StepContext(
                    strategy.spec,
                    parameters,
                    group,
                    messages,
                    lambda: create_message_exchange(strategy, carried_by),
                    outer_weights(ddp.module),
                    encodes=strategy.encodes,
                    keeps_residuals=strategy.feedback is not None,
                ),
            )
            exchange = _exchange_of_gradients(ddp, strategy, parameters, messages)
        except MissingCapabilityError as error:
            refuse(strategy.spec, str(error))
        self.exchange = ModelExchange(
            ddp.module,
            parameters,
            strategy.schedule,
            spec=strategy.spec,
            exchange=exchange,
            policy=policy,
            group=group,
            find_unused_parameters=ddp.find_unused_parameters or ddp.static_graph,
        )
        rule = strategy.optimizer_rule
        self.updates = UpdateControl(
            strategy.spec,
            [parameter for _, parameter in parameters],
            self.exchange,
            policy,
            rule and rule.for_model(ddp.module),
            takes_momentum=strategy.codec is not None and strategy.codec.takes_momentum,
        )
        _watch_passes()
        # The reducer's hooks go with the reducer: nothing of it may stay behind.
        ddp.reducer._remove_autograd_hooks()
        ddp.logger = _NoLogger(strategy.spec)
        self._reducer = _ReducerStandIn(self.exchange, self.updates, strategy.spec)
        ddp.reducer = self._reducer  # type: ignore[assignment]

    def close(self) -> None:
        """Applies all pending averages and removes all hooks from the model. Collective.

        The wrapper cannot train the model any more.
        """
        self.updates.end()
        self.updates.close()
        self.exchange.close()
        self._reducer.is_closed = True


def create_step_policy(strategy: Strategy, context: StepContext) -> StepPolicy:
    """What executes a strategy's synchronization, delay or frequency; else `EveryStep`.

    Collective: all ranks of the context's group have to call it at the same point.
    """
    if strategy.place == "servers":
        return ServerUpdates(strategy, context)
    if strategy.schedule.wait == "next_update":
        return OneStepDelay(strategy, context)
    technique = strategy.frequency or strategy.synchronization
    return EveryStep(context) if technique is None else technique.policy(context)


def _exchange_of_gradients(
    ddp: DistributedDataParallel,
    strategy: Strategy,
    parameters: list[tuple[str, nn.Parameter]],
    messages: dist.ProcessGroup,
) -> MessageExchange:
    """What averages gradients in backward."""
    if isinstance(strategy.frequency, PostLocalSgd) and strategy.architecture is not None:
        # The codec encodes what is exchanged later: parameters.
        return create_message_exchange(replace(strategy, codec=None, feedback=None), messages)
    if strategy.place in ("servers", "peers") or strategy.exchanges != "gradients":
        return AllReduce(messages)
    if isinstance(strategy.schedule, Poseidon):
        return FactorExchange(messages, strategy.schedule, ddp.module, parameters)
    return create_message_exchange(strategy, _averaging(strategy, messages))


def _check(ddp: Any, strategy: Strategy) -> None:
    """Rejects options of DistributedDataParallel that the engine does not support."""
    unsupported = {
        "mixed_precision=": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params=": bool(getattr(ddp, "_delay_all_reduce_params", None)),
        "its Python reducer": bool(getattr(ddp, "_use_python_reducer", False)),
    }
    for option, used in unsupported.items():
        if used:
            refuse(strategy.spec, f"the job uses DistributedDataParallel with {option}")
    if (reason := refused_ranks(strategy, ddp.process_group.size())) is not None:
        refuse(strategy.spec, reason)
    try:
        require_packages(strategy)
    except MissingCapabilityError as error:
        refuse(strategy.spec, str(error))
    changed = (strategy.optimizer_rule, strategy.architecture, strategy.synchronization)
    if any(p.is_complex() for p in ddp._module_parameters) and (
        strategy.encodes
        or any(each is not None for each in changed)
        or strategy.exchanges == "momentum"
        or isinstance(strategy.frequency, NoLoCo)
    ):
        refuse(
            strategy.spec,
            "the model has complex parameters, which only schedules, accumulate, localsgd and "
            "diloco can exchange",
        )
    knows_layers = not isinstance(ddp.module, nn.ParameterList)
    schedule = strategy.schedule
    if not knows_layers and (schedule.wait == "layer" or isinstance(schedule, Poseidon)):
        refuse(
            strategy.spec,
            "the job wraps its model with replicate(), which hides the layers from the strategy; "
            "use DistributedDataParallel",
        )


def _check_transport(ddp: DistributedDataParallel, strategy: Strategy) -> None:
    """Rejects a transport that cannot send the model's gradients."""
    if strategy.transport is None:
        return
    devices = {parameter.device.type for parameter in ddp._module_parameters}
    if devices - {strategy.transport.device}:
        refuse(
            strategy.spec,
            f"the transport {strategy.transport.name} sends tensors of the device "
            f"{strategy.transport.device}, and the model is on {', '.join(sorted(devices))}",
        )


def _averaging(strategy: Strategy, messages: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that average gradients with this one in each step."""
    if not isinstance(strategy.synchronization, Grouped):
        return messages
    names = dist.get_process_group_ranks(messages)
    own = messages
    for number, members in enumerate(strategy.synchronization.groups(messages.size())):
        made = dist.new_group(
            [names[member] for member in members],
            backend=dist.get_backend(messages),
            group_desc=f"ddltrace:group {number}",
        )
        if messages.rank() in members:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    return own


def _stop_broadcasts(ddp: DistributedDataParallel, strategy: Strategy) -> None:
    """Leaves each rank its own buffers: a broadcast in each forward would keep ranks in step."""
    if ddp.broadcast_buffers and ddp.modules_buffers:
        ddp.broadcast_buffers = False
        report_restriction(
            strategy.spec,
            "each rank keeps its own buffers, such as those of batch normalization, because "
            "ranks are not at the same step",
        )


_with_messages: Final[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()
"""Process groups of the job that already carry the messages of a model."""


def _group_for_messages(strategy: Strategy, ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The model's own group if all ranks launch its collectives in the same order, else a new one.

    The order can differ if other threads launch messages, if two models send theirs in the group,
    or if ranks use different parameters and start messages at different points of backward.
    """
    group = ddp.process_group
    if strategy.transport is not None:
        return new_group_like(group, "exchange", backend_of(strategy.transport))
    if (
        strategy.schedule.agreement == "plan"
        and not strategy.encodes
        and strategy.architecture is None
        and strategy.place == "all"
        and not (ddp.find_unused_parameters or ddp.static_graph)
        and group not in _with_messages
    ):
        _with_messages.add(group)
        return group
    return new_group_like(group, "exchange")


_watching: Final[list[bool]] = []


def _watch_passes() -> None:
    """Lets every model that is taken over know when a pass begins, once in a process."""
    module: Any = distributed
    ddp: Any = DistributedDataParallel
    before, after = ddp._pre_forward, ddp._post_forward
    if _watching:
        return
    _watching.append(True)

    @functools.wraps(before)
    def pre_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        reducer: Any = self.reducer
        if isinstance(reducer, _ReducerStandIn) and torch.is_grad_enabled():
            reducer.begin_forward()
        return before(self, *inputs, **kwargs)

    @functools.wraps(after)
    def post_forward(self: DistributedDataParallel, output: Any) -> Any:
        result = after(self, output)
        reducer: Any = self.reducer
        if (
            isinstance(reducer, _ReducerStandIn)
            and torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and not torch.compiler.is_compiling()
        ):
            for tensor in module._find_tensors(result):
                if tensor.grad_fn is not None:
                    tensor.register_hook(reducer.backward_begun)
        return result

    ddp._pre_forward = pre_forward
    ddp._post_forward = post_forward


class _ReducerStandIn:
    """Receives the calls of DistributedDataParallel to its reducer.

    Attributes:
        is_closed: Whether the strategy has ended in this wrapper.
    """

    def __init__(self, exchange: ModelExchange, updates: UpdateControl, spec: str) -> None:
        self._exchange = exchange
        self._updates = updates
        self._spec = spec
        self.is_closed = False

    def begin_forward(self) -> None:
        """A forward pass that records gradients begins."""
        self._updates.begin_forward()

    def prepare_for_forward(self) -> None:
        """The backward pass of the forward pass that begins synchronizes gradients."""
        self._exchange.pending.begin_forward()

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """The next backward pass synchronizes gradients."""
        del outputs
        if self.is_closed:
            refuse(
                self._spec,
                "the job trains with a wrapper of its model in which the strategy has ended, "
                "because the model was wrapped again; train with the last wrapper",
            )
        self._updates.begin_pass()
        self._exchange.begin_backward()

    def backward_begun(self, gradient: torch.Tensor) -> None:
        """A hook of the model's outputs."""
        del gradient
        self._exchange.backward_begun()

    def _rebuild_buckets(self) -> bool:
        return False

    def _set_static_graph(self) -> None:
        """Does nothing: the engine does not depend on a static graph."""

    def _delay_all_reduce(self) -> None:
        """Does nothing: the engine sends all gradients in its own hooks."""

    def _remove_autograd_hooks(self) -> None:
        """Does nothing: the engine removes its own hooks."""

    def _set_forward_pass_work_handle(self, *_: object) -> None:
        refuse(self._spec, "the job uses DistributedDataParallel.join()")


class _NoLogger:
    """Receives the calls of DistributedDataParallel to the reducer's logger."""

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def _set_uneven_input_join(self) -> None:
        """Called when a job enters `DistributedDataParallel.join`, before its first step there."""
        refuse(self._spec, "the job uses DistributedDataParallel.join()")

    def set_runtime_stats_and_log(self) -> None:
        """Nothing to log."""

    def set_error_and_log(self, error: str) -> None:
        """Nothing to log."""
        del error

    def _set_static_graph(self) -> None:
        """Nothing to log."""

    def _set_comm_hook_name(self, name: str) -> None:
        """Nothing to log."""
        del name

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(strs_map={}, ints_map={})
