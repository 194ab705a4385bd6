"""A strategy: one technique on each axis, written as a spec such as ``ddp:bucket_mb=4``.

A spec is one or more techniques joined by ``+``, each a name with parameters
(``name:key=value,key=value``). Axes that are not named keep what happens anyway.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Final, Literal

from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.strategy.catalogue import choosable, technique
from ddltrace.tracer.errors import UsageError

BASELINE: Final = "ddp"
"""What others are compared with: PyTorch's DistributedDataParallel as it comes."""


@dataclass(frozen=True)
class Strategy:
    """A composition along the axes.

    Attributes:
        spec: Its canonical text, which `parse` reads back.
        schedule: Its value on the order axis.
    """

    spec: str
    schedule: Schedule

    @property
    def slug(self) -> str:
        """A name for its files: letters, digits, ``.``, ``-`` and ``_`` only."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.spec)


def parse(spec: str) -> Strategy:
    """Reads a strategy's spec.

    Args:
        spec: For example ``wfbp`` or ``ddp:bucket_mb=4``.

    Returns:
        The strategy, its spec in canonical form.

    Raises:
        UsageError: A name or parameter does not exist, has a bad value, or two techniques
            stand on one axis.
    """
    chosen: dict[str, Any] = {}
    texts = []
    for part in spec.split("+"):
        name, _, arguments = part.strip().partition(":")
        entry = technique(name)
        if entry is None or entry.build is None:
            raise UsageError(
                f"strategy {spec!r:.80}: there is no {name!r:.40}; "
                f"there are: {', '.join(choosable())} (see: ddltrace experiment list)"
            )
        if entry.axis in chosen:
            raise UsageError(f"strategy {spec!r:.80}: two techniques on the {entry.axis} axis")
        values = _read_arguments(spec, name, entry.build, arguments)
        try:
            chosen[entry.axis] = entry.build(**values)
        except ValueError as error:
            raise UsageError(f"strategy {spec!r:.80}: {error}") from error
        texts.append(_canonical(name, values))
    return Strategy(spec="+".join(texts), schedule=chosen["order"])


@dataclass(frozen=True)
class Parameter:
    """One parameter of a technique.

    Attributes:
        type: Of its value.
        default: Its value where none is given.
        choices: The only values there are; empty if any of the type will do.
    """

    type: type
    default: Any
    choices: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        """What may be given, in words."""
        return " or ".join(map(str, self.choices)) or self.type.__name__


def parameters_of(build: type[Any]) -> dict[str, Parameter]:
    """The parameters of a technique's class by name: its fields."""
    hints = typing.get_type_hints(build)
    return {
        field.name: _parameter(hints[field.name], field.default)
        for field in dataclasses.fields(build)
    }


def _parameter(hint: Any, default: Any) -> Parameter:
    if typing.get_origin(hint) is Literal:
        return Parameter(str, default, typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in hint.__args__ if member is not type(None))
    assert isinstance(hint, type)
    return Parameter(hint, default)


def _read_arguments(spec: str, name: str, build: type[Any], text: str) -> dict[str, Any]:
    known = parameters_of(build)
    values: dict[str, Any] = {}
    for argument in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in argument.partition("="))
        if not equals or key not in known:
            names = ", ".join(f"{k}=" for k in known) or "none"
            raise UsageError(
                f"strategy {spec!r:.80}: {argument!r:.40} is no parameter of {name} "
                f"(it has: {names})"
            )
        parameter = known[key]
        try:
            values[key] = parameter.type(value)
            if parameter.choices and values[key] not in parameter.choices:
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(
                f"strategy {spec!r:.80}: {key} must be {parameter.kind}, not {value!r:.40}"
            ) from error
    return values


def _canonical(name: str, values: dict[str, Any]) -> str:
    arguments = ",".join(f"{key}={_number(value)}" for key, value in sorted(values.items()))
    return f"{name}:{arguments}" if arguments else name


def _number(value: Any) -> str:
    # 25.0 reads better as 25, but no digit may be lost.
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
