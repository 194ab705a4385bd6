"""The grammar of specs: techniques joined by ``+``, each ``NAME`` or ``NAME:KEY=VALUE,...``."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from ddltrace.experiments.technique import Technique
from ddltrace.tracer.errors import UsageError

_T = TypeVar("_T")

MODIFIER: Final = "modifier"
"""The key under which `Grammar.read` returns a modifier."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a technique.

    Attributes:
        type: Type of its value.
        default: Its value if the spec does not contain it.
        choices: All possible values; empty if any value of the type is possible.
    """

    type: type
    default: Any
    choices: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        """Describes its possible values."""
        if self.type is bool:
            return "true or false"
        return " or ".join(map(str, self.choices)) or self.type.__name__


@dataclass(frozen=True)
class Named:
    """A technique that a spec names.

    Attributes:
        technique: The technique.
        value: Its description: an instance of ``technique.build``.
        text: Its canonical text, which reads back to the same value.
    """

    technique: Technique
    value: object
    text: str

    def of(self, kind: type[_T]) -> _T:
        """The description, which is of this kind on the technique's axis."""
        assert isinstance(self.value, kind)
        return self.value


class Grammar:
    """Reads specs of some techniques."""

    def __init__(
        self,
        kind: str,
        techniques: Callable[[], Sequence[Technique]],
        presets: Mapping[str, str] | None = None,
    ) -> None:
        """Stores the vocabulary.

        Args:
            kind: Name of the described object in messages, such as ``strategy``.
            techniques: Returns those that exist now; those with a ``build`` can be named.
            presets: Specs by the name that stands for them.
        """
        self._kind = kind
        self._techniques = techniques
        self._presets = presets or {}

    def names(self) -> list[str]:
        """All names that a spec can use: techniques, then presets."""
        return [*self._by_name(), *self._presets]

    def _by_name(self) -> dict[str, Technique]:
        return {entry.name: entry for entry in self._techniques() if entry.build is not None}

    def read(self, spec: str) -> dict[str, Named]:
        """Reads a spec.

        Args:
            spec: For example ``topk:density=0.01+feedback``.

        Returns:
            The techniques by their axis, a modifier as `MODIFIER`; in the order of the spec, with
            presets written out.

        Raises:
            UsageError: A name or parameter does not exist, is given twice or has a bad value, two
                techniques are on one axis, or a modifier has no technique to modify.
        """
        found: dict[str, Named] = {}
        for part in self._expanded(spec):
            named = self._read_part(spec, part)
            entry = named.technique
            key = MODIFIER if entry.modifier else entry.axis
            if key in found:
                raise self.error(
                    spec,
                    f"two techniques on the {entry.axis} axis, {found[key].technique.name} and "
                    f"{entry.name}: keep one of them",
                )
            found[key] = named
        self._check_modifier(spec, found)
        return found

    def error(self, spec: str, reason: str) -> UsageError:
        """The error of a spec that cannot be used."""
        return UsageError(f"{self._kind} {spec!r:.80}: {reason}")

    def _expanded(self, spec: str) -> list[str]:
        """The parts of a spec, with presets replaced by the techniques that they stand for."""
        parts: list[str] = []
        for text in spec.split("+"):
            part = text.strip()
            parts += self._presets.get(part, part).split("+")
        return parts

    def _read_part(self, spec: str, part: str) -> Named:
        name, _, arguments = part.partition(":")
        if not name:
            raise self.error(spec, f"a name is missing; there are: {', '.join(self.names())}")
        if name in self._presets:
            raise self.error(
                spec,
                f"{name} is a preset and has no parameters; write what it stands for: "
                f"{self._presets[name]}",
            )
        entry = self._by_name().get(name)
        if entry is None or entry.build is None:
            raise self.error(
                spec,
                f"there is no {name!r:.40}; there are: {', '.join(self.names())} "
                "(see: ddltrace experiment list)",
            )
        given = self._read_arguments(spec, entry.build, name, arguments)
        try:
            return Named(entry, entry.build(**given), _canonical(name, given))
        except ValueError as error:
            raise self.error(spec, str(error)) from error

    def _read_arguments(self, spec: str, build: type[Any], name: str, text: str) -> dict[str, Any]:
        known = parameters_of(build)
        values: dict[str, Any] = {}
        for argument in filter(None, text.split(",")):
            key, equals, value = (piece.strip() for piece in argument.partition("="))
            if not equals or key not in known:
                names = ", ".join(f"{k}=" for k in known) or "none"
                raise self.error(
                    spec, f"{argument!r:.40} is not a parameter of {name} (it has: {names})"
                )
            if key in values:
                raise self.error(spec, f"{key} of {name} is given twice: keep one value")
            parameter = known[key]
            try:
                values[key] = _read_bool(value) if parameter.type is bool else parameter.type(value)
                if parameter.choices and values[key] not in parameter.choices:
                    raise ValueError(value)
            except ValueError as error:
                raise self.error(
                    spec, f"{key} must be {parameter.kind}, not {value!r:.40}"
                ) from error
        return values

    def _check_modifier(self, spec: str, found: Mapping[str, Named]) -> None:
        if MODIFIER not in found:
            return
        modifier = found[MODIFIER].technique
        if modifier.modifier != "required" or modifier.axis in found:
            return
        others = [
            entry.name
            for entry in self._techniques()
            if entry.build is not None and entry.axis == modifier.axis and not entry.modifier
        ]
        raise self.error(
            spec,
            f"{modifier.name} changes another technique of the {modifier.axis} axis; "
            f"add one of: {', '.join(others)}",
        )


def parameters_of(build: type[Any]) -> dict[str, Parameter]:
    """The parameters of a technique by name: the fields of its class."""
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
    # 25.0 is written as 25, but no digit may be lost.
    return str(value).removesuffix(".0").replace("e+", "e")  # + joins techniques
