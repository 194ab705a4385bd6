"""Validates the form of the experiments page and converts it to arguments of ``experiment run``."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddltrace.analyzer.formatting.quantities import parse_bandwidth
from ddltrace.experiments.harness.job_command import check_own_command
from ddltrace.experiments.network.emulated import check_capabilities
from ddltrace.experiments.strategy.spec import parse, refuse_repeated
from ddltrace.experiments.workloads import WORKLOADS
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.emulated_hosts import NAMES
from ddltrace.tracer.masked_command import is_masked
from ddltrace.tracer.optional_packages import require_extra, require_torch

MAX_STRATEGIES: Final = 64
LIMITS: Final = {
    "ranks": (2, 64),
    "hosts": (2, 64),
    "steps": (2, 100_000),
    "warmup": (1, 99_999),
    "repeats": (1, 100),
}
"""Smallest and largest value of each number of the form."""

_WORKLOAD: Final = "workload:"
_TRACE: Final = "trace:"


@dataclass(frozen=True)
class RunRequest:
    """A checked request.

    Attributes:
        strategies: Specs in canonical form, at least one, none twice.
        workload: Name of a built-in workload; None for the command of a trace.
        command: The job of a trace; empty for a workload.
        ranks: Rank processes; None for the default.
        hosts: Hosts of the emulated network; None for this machine's own network.
        bandwidth: Rate of each host's link; None without hosts.
        steps, warmup, repeats: Values of the options of ``experiment run``.
    """

    strategies: tuple[str, ...]
    workload: str | None
    command: tuple[str, ...]
    ranks: int | None
    hosts: int | None
    bandwidth: str | None
    steps: int
    warmup: int
    repeats: int

    def arguments(self) -> list[str]:
        """Options and command of ``ddltrace experiment run``, one list item per argument."""
        given = [f"--strategy={spec}" for spec in self.strategies]
        given += [f"--{name}={getattr(self, name)}" for name in ("steps", "warmup", "repeats")]
        for name in ("ranks", "hosts", "bandwidth", "workload"):
            value = getattr(self, name)
            if value is not None:
                given.append(f"--{name}={value}")
        return [*given, "--", *self.command] if self.command else given


def shown_words(command: Sequence[str]) -> list[str]:
    r"""The words of a command, each whole and shown as exactly one text.

    A trace can come from anyone. Characters that are not printable, among them those that change
    the direction of text, stand there as in Python literals, and so no other word looks the same.
    """
    return [
        shlex.quote(word) if word.isprintable() and "\\" not in word else repr(word)
        for word in command
    ]


def confirmation(command: Sequence[str]) -> str:
    """What a request contains after its user has seen the command of a trace and agreed to it."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def read_request(values: Mapping[str, Any], commands: Mapping[int, Sequence[str]]) -> RunRequest:
    """Checks the fields of the form.

    Args:
        values: ``strategies`` (text, one spec per line), ``job`` (``workload:NAME`` or
            ``trace:NUMBER``), and the keys of `LIMITS` and ``bandwidth``.
        commands: Number of each trace -> its recorded command. A page can choose one of these
            commands, and cannot send one of its own.

    Raises:
        UsageError: A field is missing or not allowed.
        MissingCapabilityError: This machine does not support such a run.
    """
    strategies = read_strategies(values.get("strategies"))
    numbers = {name: _number(values, name) for name in LIMITS}
    bandwidth = _text(values, "bandwidth") or None
    hosts = numbers["hosts"]
    if (hosts is None) != (bandwidth is None):
        raise UsageError("hosts and bandwidth belong together: fill in both or neither")
    workload, command = _job(_text(values, "job"), commands)
    ranks = numbers["ranks"]
    if command and ranks is not None:
        raise UsageError("the trace's command sets its own number of ranks: leave ranks empty")
    if hosts is not None and ranks not in (None, hosts):
        raise UsageError(f"{hosts} hosts run one rank each: leave ranks empty")
    steps, warmup = numbers["steps"] or 60, numbers["warmup"] or 10
    if warmup >= steps:
        raise UsageError(f"{steps} steps leave nothing after a warm-up of {warmup}")
    require_torch("ddltrace experiment run")
    if workload is not None and WORKLOADS[workload].needs_sklearn:
        require_extra("experiments", f"the workload {workload}", by_import=False)
    if bandwidth is not None:
        parse_bandwidth(bandwidth)
        check_capabilities()
    if command:
        check_own_command(command, {**dict.fromkeys(NAMES), "hosts": hosts, "bandwidth": bandwidth})
    return RunRequest(
        strategies=strategies,
        workload=workload,
        command=command,
        ranks=ranks,
        hosts=hosts,
        bandwidth=bandwidth,
        steps=steps,
        warmup=warmup,
        repeats=numbers["repeats"] or 3,
    )


def read_strategies(text: object) -> tuple[str, ...]:
    """The specs of a text with one spec per line, in canonical form.

    Raises:
        UsageError: There is none, one is wrong, one is given twice, or there are too many.
    """
    if not isinstance(text, str):
        raise UsageError("strategies must be a text with one strategy per line")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError("choose at least one strategy")
    if len(lines) > MAX_STRATEGIES:
        raise UsageError(f"{len(lines)} strategies are too many: at most {MAX_STRATEGIES}")
    specs = [parse(line).spec for line in lines]
    refuse_repeated(specs)
    return tuple(specs)


def _job(text: str, commands: Mapping[int, Sequence[str]]) -> tuple[str | None, tuple[str, ...]]:
    name = text.removeprefix(_WORKLOAD)
    if text.startswith(_WORKLOAD) and name in WORKLOADS:
        return name, ()
    number = text.removeprefix(_TRACE)
    if text.startswith(_TRACE) and number.isascii() and number.isdecimal():
        command = tuple(commands.get(int(number[:9]), ()))
        if is_masked(command):
            raise UsageError(
                "secrets in this command were not recorded (***): run it in a terminal, or record "
                "the job with --keep-command"
            )
        if command:
            return None, command
    raise UsageError(f"there is no job {text!r:.60}; choose one of the list")


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{key} must be a text")
    return value.strip()


def _number(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is None or value == "":
        return None
    low, high = LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{key} must be a whole number from {low} to {high}, not {value!r:.40}")
    return value
