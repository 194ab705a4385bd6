"""The torch side of the frequency axis."""

from __future__ import annotations

from ddltrace.experiments.engine.step_policy import StepContext, StepPolicy
from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.policies.accumulation import AccumulationPolicy
from ddltrace.experiments.frequency.policies.averaging import AveragingPolicy
from ddltrace.experiments.frequency.policies.decoupled_momentum import DecoupledMomentumPolicy
from ddltrace.experiments.frequency.policies.outer_steps import OuterStepPolicy
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo
from ddltrace.experiments.strategy.spec import Strategy


def create(strategy: Strategy, context: StepContext) -> StepPolicy:
    """The policy of a strategy that names a frequency.

    Args:
        strategy: Its frequency decides.
        context: What the policy works on.
    """
    frequency = strategy.frequency
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
