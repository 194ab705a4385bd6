"""One technique: one value on one axis of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

STATE_PREFIX: Final = "ddltrace_"
"""Begin of the keys under which techniques keep state of a parameter in the job's optimizer.
Checkpoints carry such state apart from the optimizer's own, which must be complete or empty."""


@dataclass(frozen=True)
class Technique:
    """One value on one axis.

    Attributes:
        axis: One of `ddltrace.experiments.strategy.catalogue.AXES`.
        name: Its name in a strategy's spec.
        summary: What the technique does, in one line.
        source: The paper or system that it comes from.
        build: The frozen dataclass whose fields are the technique's parameters. None for the
            default of an axis, and for the network, which options of the command choose.
        needs: Requirements on the job or the machine, each in a few words.
        modifier: None for an independent technique. ``required``: it modifies another technique of
            its axis, which the spec must contain. ``optional``: it may be used alone.
    """

    axis: str
    name: str
    summary: str
    source: str = ""
    build: type[Any] | None = None
    needs: tuple[str, ...] = ()
    modifier: Literal["required", "optional"] | None = None
