"""Creates the step policy of a strategy's frequency technique or schedule."""

from __future__ import annotations

import torch.distributed as dist

from ddltrace.experiments.engine.group_averaging import ClockedSteps, GroupAveraging
from ddltrace.experiments.engine.neighbour_averaging import NeighbourMean, PairMean
from ddltrace.experiments.engine.one_step_delay import OneStepDelay
from ddltrace.experiments.engine.server_updates import ServerUpdates
from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.dion import Dion
from ddltrace.experiments.frequency.local_sgd import LocalSgd
from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.frequency.policies.accumulation import AccumulationPolicy
from ddltrace.experiments.frequency.policies.averaging import AveragingPolicy
from ddltrace.experiments.frequency.policies.decoupled_momentum import DecoupledMomentumPolicy
from ddltrace.experiments.frequency.policies.low_rank_momentum import LowRankMomentumPolicy
from ddltrace.experiments.frequency.policies.outer_steps import OuterStepPolicy
from ddltrace.experiments.frequency.policies.pair_steps import PairStepPolicy
from ddltrace.experiments.frequency.policies.step_policy import EveryStep, StepContext, StepPolicy
from ddltrace.experiments.frequency.post_local_sgd import PostLocalSgd
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped


def create_step_policy(
    strategy: Strategy, context: StepContext, messages: dist.ProcessGroup
) -> StepPolicy:
    """Creates the policy of a strategy's synchronization, frequency or delay; else `EveryStep`.

    Collective: all ranks of the context's group have to call it at the same point.

    Args:
        strategy: Its synchronization, its frequency technique and its schedule decide.
        context: The model's parameters, its ranks and their exchange.
        messages: The same ranks in the group that carries the strategy's messages.
    """
    policy = _policy_of_rule(strategy, context, messages)
    if policy is not None:
        return policy
    if strategy.schedule.wait == "next_update":
        return OneStepDelay(strategy, context)
    frequency = strategy.frequency
    if frequency is None:
        return ClockedSteps(context) if strategy.synchronization else EveryStep(context)
    return _policy_of_frequency(strategy, context)


def _policy_of_frequency(strategy: Strategy, context: StepContext) -> StepPolicy:
    """The policy of a frequency technique."""
    frequency = strategy.frequency
    if isinstance(frequency, Accumulate):
        return AccumulationPolicy(context, frequency)
    if isinstance(frequency, Demo):
        return DecoupledMomentumPolicy(context, frequency)
    if isinstance(frequency, Dion):
        return LowRankMomentumPolicy(context, frequency)
    if isinstance(frequency, NoLoCo):
        return PairStepPolicy(context, frequency)
    if isinstance(frequency, DiLoCo | StreamingDiLoCo):
        momentum = frequency.outer_momentum
        if momentum is None:
            momentum = 0.9 if strategy.feedback is None else 0.0
        return OuterStepPolicy(context, frequency, momentum)
    assert isinstance(frequency, LocalSgd | PostLocalSgd)
    return AveragingPolicy(context, frequency, differences=strategy.encodes)


def _policy_of_rule(
    strategy: Strategy, context: StepContext, messages: dist.ProcessGroup
) -> StepPolicy | None:
    """The policy of a rule of synchronization that is not bulk synchronous; else None."""
    rule = strategy.synchronization
    if isinstance(rule, Grouped):
        return GroupAveraging(rule, context)
    if isinstance(rule, Gossip):
        return NeighbourMean(strategy.spec, rule, context, messages)
    if isinstance(rule, AdPsgd):
        return PairMean(strategy.spec, rule, context, messages)
    if rule is not None and rule.place == "servers":
        return ServerUpdates(strategy, context, dist.get_backend(messages))
    return None
