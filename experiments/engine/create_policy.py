"""The step policy that a strategy's frequency technique or schedule asks for."""

from __future__ import annotations

from ddltrace.experiments.engine.one_step_delay import OneStepDelay
from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.policies.accumulation import AccumulationPolicy
from ddltrace.experiments.frequency.policies.averaging import AveragingPolicy
from ddltrace.experiments.frequency.policies.decoupled_momentum import DecoupledMomentumPolicy
from ddltrace.experiments.frequency.policies.outer_steps import OuterStepPolicy
from ddltrace.experiments.frequency.policies.step_policy import EveryStep, StepContext, StepPolicy
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo
from ddltrace.experiments.strategy.strategy import Strategy


def create_step_policy(strategy: Strategy, context: StepContext) -> StepPolicy:
    """Creates the policy of a strategy's frequency technique or delay; without one, `EveryStep`.

    Collective: all ranks of the context's group have to call it at the same point.

    Args:
        strategy: Its frequency technique and its schedule decide.
        context: The model's parameters, its ranks and their exchange.
    """
    if strategy.schedule.wait == "next_update":
        return OneStepDelay(strategy, context)
    frequency = strategy.frequency
    if frequency is None:
        return EveryStep(context)
    if isinstance(frequency, Accumulate):
        return AccumulationPolicy(context, frequency)
    if isinstance(frequency, Demo):
        return DecoupledMomentumPolicy(context, frequency)
    if isinstance(frequency, DiLoCo | StreamingDiLoCo):
        momentum = frequency.outer_momentum
        if momentum is None:
            momentum = 0.9 if strategy.feedback is None else 0.0
        return OuterStepPolicy(context, frequency, momentum)
    encoded = strategy.codec is not None or strategy.feedback is not None
    return AveragingPolicy(context, frequency, differences=encoded)
