"""Loads techniques of the user: from files (``--plugin``) and from installed packages.

A plug-in is a Python file, or a module that a package names in the entry point group
``ddltrace.techniques``, and registers techniques by the decorator `technique`. The command checks
it before the job starts; each rank loads the same file, which its checksum proves.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddltrace.experiments.architectures.base import AnyArchitecture
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier
from ddltrace.experiments.grammar import parameters_of
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.presets import PRESETS
from ddltrace.experiments.technique import Technique
from ddltrace.tracer.errors import UsageError

GROUP: Final = "ddltrace.techniques"
"""The entry point group of packages that bring techniques."""

_ENTRY: Final = "entry point "
_ENVIRONMENT: Final = "DDLTRACE_TECHNIQUES"

_KINDS: Final[dict[str, tuple[type[object], ...]]] = {
    "volume": (CodecDescription, Modifier),
    "order": (Schedule,),
    "optimizer": (OptimizerRule,),
    "architecture": (AnyArchitecture,),
}
"""Base classes of the techniques that a plug-in can bring. What executes those of the other axes is
chosen by the engine from its own classes."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plug-in, as results record it.

    Attributes:
        source: The file, or the name of the entry point.
        sha256: Checksum of the file's contents.
        techniques: Names of the techniques that it registers.
    """

    source: str
    sha256: str
    techniques: list[str]


_loaded: Final[dict[str, Plugin]] = {}


def load(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Loads the plug-ins of a command, and those of installed packages.

    Processes that this one starts load the same ones by `load_inherited`.

    Args:
        sources: The files.

    Returns:
        The record of each plug-in, for results and for `load_recorded`.

    Raises:
        UsageError: One is missing, broken or registers nothing that can be used.
    """
    found = [_load_file(Path(source).absolute()) for source in dict.fromkeys(sources)]
    records = [dataclasses.asdict(plugin) for plugin in (*found, *_load_installed())]
    if records:
        os.environ[_ENVIRONMENT] = json.dumps(records)
    return records


def load_inherited() -> None:
    """Loads the plug-ins of the command that started this process.

    Raises:
        UsageError: As `load_recorded`.
    """
    load_recorded(json.loads(os.environ.get(_ENVIRONMENT, "[]")))


def load_recorded(records: Sequence[dict[str, Any]]) -> None:
    """Loads plug-ins that a command has recorded: in a rank, or to resume an experiment.

    Raises:
        UsageError: As `load`; or a plug-in is another one than that of the command.
    """
    installed = {plugin.source: plugin for plugin in _load_installed()}
    for record in records:
        source = str(record["source"])
        own = installed.get(source)
        if own is None:
            own = _load_file(Path(source))
        if own.sha256 != record["sha256"]:
            raise UsageError(
                f"plug-in {source} is not the one with which the job was started; copy the same "
                "file to every host"
            )


def plugin_files(records: Sequence[dict[str, Any]]) -> list[str]:
    """The files among the recorded plug-ins; the others are found as installed packages."""
    return [str(record["source"]) for record in records if not record["source"].startswith(_ENTRY)]


def _load_file(file: Path) -> Plugin:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"plug-in {file} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    known = _loaded.get(str(file))
    if known is not None and known.sha256 == digest:
        return known
    before = techniques()
    name = f"ddltrace_plugin_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise UsageError(f"plug-in {file} must be a Python file: its name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(content, str(file), "exec"), module.__dict__)
    except Exception as error:
        raise _broken(str(file), error) from error
    plugin = _checked(str(file), digest, [t for t in techniques() if t not in before])
    _loaded[str(file)] = plugin
    return plugin


@functools.cache
def _load_installed() -> tuple[Plugin, ...]:
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        before = techniques()
        source = f"{_ENTRY}{entry.name} of {GROUP}"
        try:
            module = importlib.import_module(entry.module)
            content = Path(str(module.__file__)).read_bytes()
        except Exception as error:
            raise _broken(source, error) from error
        new = [t for t in techniques() if t not in before]
        found.append(_checked(source, hashlib.sha256(content).hexdigest(), new))
    return tuple(found)


def _broken(source: str, error: Exception) -> UsageError:
    """The error of a plug-in's code, with its line if that is in the file."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == source:
            line = frame.lineno
    where = source if line is None else f"{source}, line {line}"
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    return UsageError(f"plug-in {where}: {type(error).__name__}: {' '.join(reason.split())}")


def _checked(source: str, digest: str, new: Sequence[Technique]) -> Plugin:
    """A plug-in whose techniques can be used."""
    if not new:
        raise UsageError(
            f"plug-in {source} registers no technique: decorate a class with "
            "ddltrace.experiments.technique.technique"
        )
    for entry in new:
        reason = _unusable(entry)
        if reason is not None:
            raise UsageError(f"plug-in {source}: the technique {entry.name}: {reason}")
    return Plugin(source, digest, [entry.name for entry in new])


def _unusable(entry: Technique) -> str | None:
    """Why a technique cannot be used; None if it can."""
    kinds = _KINDS.get(entry.axis)
    if kinds is None:
        axes = ", ".join(_KINDS)
        return f"plug-ins cannot bring a technique of the axis {entry.axis}, only of {axes}"
    if entry.build is None or not issubclass(entry.build, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        return f"its class must be a subclass of {names}"
    if entry.name in {preset.name for preset in PRESETS}:
        return "there is a preset of this name; choose another name"
    try:
        parameters_of(entry.build)
        description = entry.build()
        if isinstance(description, CodecDescription):
            description.codec(None)
    except Exception as error:  # noqa: BLE001 - any error of the user's code
        return f"{type(error).__name__}: {error}"
    return None
