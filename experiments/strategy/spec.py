"""A strategy: one technique on each axis, written as a spec such as ``topk+feedback+wfbp``.

A spec is one or more techniques joined by ``+``, each a name with parameters
(``name:key=value,key=value``), or the name of a preset, which stands for such a spec. Axes
that are not named keep their default.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Final, Literal

from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.catalogue import choosable, technique
from ddltrace.experiments.strategy.presets import PRESETS, preset
from ddltrace.experiments.strategy.rules import violated
from ddltrace.experiments.strategy.technique import Technique
from ddltrace.tracer.errors import UsageError

BASELINE: Final = "ddp"
"""The strategy that others are compared with: DistributedDataParallel with its defaults."""


@dataclass(frozen=True)
class Strategy:
    """A composition along the axes; None on an axis is the axis's default.

    Attributes:
        spec: Its canonical text, which `parse` reads back.
        schedule: The order axis.
        codec: The volume axis.
        feedback: The modifier of the codec, such as error feedback.
        frequency: The frequency axis.
        optimizer_rule: The optimizer axis.
        architecture: The architecture axis.
        synchronization: The synchronization axis.
        transport: The transport axis.
    """

    spec: str
    schedule: Schedule
    codec: Any = None
    feedback: Any = None
    frequency: Any = None
    optimizer_rule: Any = None
    architecture: Any = None
    synchronization: Any = None
    transport: Any = None

    @property
    def slug(self) -> str:
        """A name for its files: letters, digits, ``.``, ``-`` and ``_`` only."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.spec)


_FIELDS: Final = {"volume": "codec", "order": "schedule", "optimizer": "optimizer_rule"}
"""Fields of `Strategy` that are not called as their axis."""


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
    values: dict[str, Any] = {}
    entries: dict[str, Technique] = {}
    texts = []
    for part in _expanded(spec):
        name, _, arguments = part.partition(":")
        entry = technique(name)
        if entry is None or entry.build is None:
            raise UsageError(
                f"strategy {spec!r:.80}: there is no {name!r:.40}; "
                f"there are: {', '.join(names())} (see: ddltrace experiment list)"
            )
        field = "feedback" if entry.modifier else _FIELDS.get(entry.axis, entry.axis)
        if field in values:
            raise UsageError(
                f"strategy {spec!r:.80}: two techniques on the {entry.axis} axis, "
                f"{entries[field].name} and {name}: keep one of them"
            )
        given = _read_arguments(spec, name, entry.build, arguments)
        try:
            values[field] = entry.build(**given)
        except ValueError as error:
            raise UsageError(f"strategy {spec!r:.80}: {error}") from error
        entries[field] = entry
        texts.append(_canonical(name, given))
    _check_modifier(spec, entries)
    values.setdefault("schedule", DdpBuckets())
    strategy = Strategy(spec="+".join(texts), **values)
    if (rule := violated(strategy)) is not None:
        raise UsageError(f"strategy {spec!r:.80}: {rule.reason}; {rule.valid}")
    return strategy


def names() -> list[str]:
    """All names that a spec may use: techniques, then presets."""
    return [*choosable(), *(entry.name for entry in PRESETS)]


def _expanded(spec: str) -> list[str]:
    """The parts of a spec, with presets replaced by the techniques that they stand for."""
    parts: list[str] = []
    for text in spec.split("+"):
        part = text.strip()
        known = preset(part)
        parts += [part] if known is None else known.expands_to.split("+")
    return parts


def _check_modifier(spec: str, entries: dict[str, Technique]) -> None:
    modifier = entries.get("feedback")
    if modifier is None or modifier.modifier != "required" or "codec" in entries:
        return
    others = [
        name
        for name in choosable()
        if (entry := technique(name)) is not None
        and entry.axis == modifier.axis
        and not entry.modifier
    ]
    raise UsageError(
        f"strategy {spec!r:.80}: {modifier.name} changes another technique of the "
        f"{modifier.axis} axis; add one of: {', '.join(others)}"
    )


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
        if self.type is bool:
            return "true or false"
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
            values[key] = _read_bool(value) if parameter.type is bool else parameter.type(value)
            if parameter.choices and values[key] not in parameter.choices:
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(
                f"strategy {spec!r:.80}: {key} must be {parameter.kind}, not {value!r:.40}"
            ) from error
    return values


def _read_bool(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError(text)
    return text == "true"


def _canonical(name: str, values: dict[str, Any]) -> str:
    arguments = ",".join(f"{key}={_number(value)}" for key, value in sorted(values.items()))
    return f"{name}:{arguments}" if arguments else name


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # 25.0 reads better as 25, but no digit may be lost.
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
