"""Reads strategies from specs such as ``topk+feedback+wfbp``.

A spec is one or more techniques joined by ``+``, each a name with parameters
(``name:key=value,key=value``), or the name of a preset, which stands for such a spec. Axes
that are not named keep their default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from ddltrace.experiments.architectures.base import AnyArchitecture
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier
from ddltrace.experiments.frequency.frequency import Frequency
from ddltrace.experiments.grammar import MODIFIER, Grammar
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.experiments.parallelism.descriptions import Parallelism
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.presets import PRESETS
from ddltrace.experiments.strategy.rules import violated
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.rule import Synchronization
from ddltrace.experiments.transports.transport import Transport
from ddltrace.tracer.errors import UsageError

BASELINE: Final = "ddp"
"""The strategy that others are compared with: DistributedDataParallel with its defaults."""

_GRAMMAR: Final = Grammar(
    "strategy", techniques, {preset.name: preset.expands_to for preset in PRESETS}
)

_Part = TypeVar("_Part")


def parse(spec: str) -> Strategy:
    """Reads a strategy's spec.

    Args:
        spec: For example ``wfbp``, ``ddp:bucket_mb=4`` or ``topk:density=0.01+feedback``.

    Returns:
        The strategy, its spec in canonical form and with presets written out.

    Raises:
        UsageError: A name or parameter does not exist, has a bad value, two techniques
            stand on one axis, or the techniques cannot be combined.
    """
    found = _GRAMMAR.read(spec)

    def part(key: str, kind: type[_Part]) -> _Part | None:
        return found[key].of(kind) if key in found else None

    strategy = Strategy(
        spec="+".join(named.text for named in found.values()),
        schedule=part("order", Schedule) or DdpBuckets(),
        codec=part("volume", CodecDescription),
        feedback=part(MODIFIER, Modifier),
        frequency=part("frequency", Frequency),
        optimizer_rule=part("optimizer", OptimizerRule),
        parallelism=part("parallelism", Parallelism),
        architecture=part("architecture", AnyArchitecture),
        synchronization=part("synchronization", Synchronization),
        transport=part("transport", Transport),
    )
    if strategy.place == "servers" and strategy.architecture is None:
        strategy = replace(strategy, architecture=ParameterServer())
    if (rule := violated(strategy)) is not None:
        raise _GRAMMAR.error(spec, f"{rule.reason}; {rule.valid}")
    return strategy


def exchange_of(spec: str) -> str:
    """What sends and averages the messages of a strategy: its codec, modifier and architecture.

    Args:
        spec: The strategy.

    Returns:
        A spec of these techniques only; `BASELINE` if it has none of them.
    """
    found = _GRAMMAR.read(spec)
    parts = [found[key].text for key in ("volume", MODIFIER, "architecture") if key in found]
    return "+".join(parts) or BASELINE


def row_strategy(name: str) -> Strategy | None:
    """The strategy of a row of an experiment.

    Args:
        name: A spec; None for any other name, such as that of a trace.
    """
    try:
        return parse(name)
    except UsageError:
        return None


def cycle_steps_of(name: str) -> int:
    """Steps after which the exchanges of a row repeat; argument as that of `row_strategy`."""
    strategy = row_strategy(name)
    return 1 if strategy is None else strategy.cycle_steps


def opening_steps_of(name: str) -> int:
    """`Strategy.opening_steps` of a row; argument as that of `row_strategy`."""
    strategy = row_strategy(name)
    return 0 if strategy is None else strategy.opening_steps


def refuse_repeated(specs: Sequence[str]) -> None:
    """Checks that no strategy is given twice.

    Args:
        specs: Specs in canonical form.

    Raises:
        UsageError: A spec occurs more than once.
    """
    repeated = {spec for spec in specs if specs.count(spec) > 1}
    if repeated:
        raise UsageError(f"strategy {min(repeated):.80} is given twice")


def names() -> list[str]:
    """All names that a spec may use: techniques, then presets."""
    return _GRAMMAR.names()
