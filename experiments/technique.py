"""One technique: one value on one axis of a strategy. The decorator `technique` registers it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

AXES: Final = (
    "frequency",
    "volume",
    "order",
    "optimizer",
    "parallelism",
    "architecture",
    "synchronization",
    "transport",
    "network",
)
"""The axes on which techniques combine.

They are those of Dong & Ouyang, "Optimization Techniques of Network Communication in Distributed
Deep Learning Systems", ZTE Technology Journal, 2020, with the optimizer's own rule added."""

STATE_PREFIX: Final = "ddltrace_"
"""Begin of the keys under which techniques keep state of a parameter in the job's optimizer.
Checkpoints carry such state apart from the optimizer's own, which must be complete or empty."""

_Build = TypeVar("_Build")


@dataclass(frozen=True)
class Technique:
    """One value on one axis.

    Attributes:
        axis: One of `AXES`.
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
    build: type[object] | None = None
    needs: tuple[str, ...] = ()
    modifier: Literal["required", "optional"] | None = None


_registered: Final[dict[str, Technique]] = {}


def technique(
    axis: str,
    name: str,
    summary: str,
    source: str = "",
    *,
    needs: tuple[str, ...] = (),
    modifier: Literal["required", "optional"] | None = None,
) -> Callable[[type[_Build]], type[_Build]]:
    """Registers a frozen dataclass as a technique; arguments as the attributes of `Technique`.

    Raises:
        ValueError: The axis does not exist, the name is taken, or the class lacks a method, is not
            a frozen dataclass or has a parameter without a default.
    """

    def register(build: type[_Build]) -> type[_Build]:
        if axis not in AXES:
            raise ValueError(f"there is no axis {axis!r}; there are: {', '.join(AXES)}")
        if not name.replace("_", "").isalnum() or name != name.lower():
            raise ValueError(f"the name {name!r} must consist of small letters, digits and _")
        if name in _registered:
            raise ValueError(f"there is a technique {name!r} already; choose another name")
        if inspect.isabstract(build):
            missing = ", ".join(sorted(getattr(build, "__abstractmethods__", ())))
            raise ValueError(f"the class {build.__name__} of {name!r} lacks: {missing}")
        if not dataclasses.is_dataclass(build):
            raise ValueError(f"the class {build.__name__} of {name!r} must be a dataclass")
        for field in dataclasses.fields(build):
            if field.default is dataclasses.MISSING:
                raise ValueError(f"the parameter {field.name!r} of {name!r} has no default")
        _registered[name] = Technique(axis, name, summary, source, build, needs, modifier)
        return build

    return register


def on_axis(axis: str, first: Sequence[type[object]]) -> tuple[Technique, ...]:
    """The registered techniques of an axis.

    Args:
        axis: One of `AXES`.
        first: Classes of the techniques that come first, in this order; those of plugins follow.
    """
    place: dict[type[object] | None, int] = {build: number for number, build in enumerate(first)}
    own = [entry for entry in _registered.values() if entry.axis == axis]
    return tuple(sorted(own, key=lambda entry: place.get(entry.build, len(first))))
