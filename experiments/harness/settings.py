"""The settings of an experiment, the same for all its strategies, and its planned runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddltrace.experiments.strategy.spec import cycle_steps_of, opening_steps_of
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.masked_command import is_masked, masked_command


@dataclass(frozen=True)
class Settings:
    """The settings of an experiment.

    Attributes:
        strategies: The strategies' specs in canonical form, in the order of the rows.
        ranks: Number of rank processes; None if the user's own command starts them.
        steps: Training steps of every row, warm-up and the most opening steps of a strategy
            included: all rows train the same number of steps, so that losses can be compared.
        warmup: Steps at the start that are trained but not measured.
        workload: Name of the built-in workload; None for the user's own job.
        width: Size of its model.
        batch_size: Examples per rank and step.
        learning_rate: Learning rate of the workload's optimizer.
        seed: Seed of the weights, the data's split and order in the first round; each further round
            adds 1.
        repeats: Rounds: each runs every strategy once. Grows by one with each further round.
        max_minutes: Further rounds are made until all differences are decided or the experiment
            has taken this long; None for no further rounds.
        also: Further settings of the user's own job, by the names of their rows: the commands.
        max_other_cores: A run during which other processes kept more cores than this busy is
            disturbed. It is made once more, and marked if it is still disturbed. None: no limit.
        timeout_s: A run that takes longer than this many seconds is ended.
        target_loss: Training loss whose time is reported; None for none.
        pace: Trace or built-in profile whose layer times the layers wait out; None if they
            compute.
        protocol: Protocol whose profile paces the messages, such as ``rdma:slowdown=200``; None
            for messages that are as fast as they are.
        slow: Ranks that compute more slowly, each as ``rank=2,factor=1.5``.
        hosts: Hosts of an emulated network; None for this machine's own.
        bandwidth: Rate of each of its links, such as ``400mbit``.
        ranks_per_host: Ranks on each host; None for one.
        hosts_per_rack: Hosts that share a switch; None for one switch.
        bandwidth_between: Rate of each rack's link to the core; None for a core that is fast
            enough.
        slow_host: A host with a slower link, as ``host=2,factor=4``; None for none.
        delay: One-way delay between hosts, such as ``2ms``; None for none.
        loss: Share of packets that are lost, such as ``0.1%``; None for none.
        command: The user's own job; empty for a workload.
        keep_command: Whether command lines are recorded with their secrets.
        plugins: The plug-ins of techniques: ``source``, ``sha256`` and ``techniques`` of each.
    """

    strategies: list[str]
    ranks: int | None
    steps: int
    warmup: int
    workload: str | None = None
    width: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    repeats: int = 1
    max_minutes: float | None = None
    also: dict[str, list[str]] = field(default_factory=dict)
    max_other_cores: float | None = None
    timeout_s: float = 3600.0
    target_loss: float | None = None
    pace: str | None = None
    protocol: str | None = None
    slow: list[str] = field(default_factory=list)
    hosts: int | None = None
    bandwidth: str | None = None
    ranks_per_host: int | None = None
    hosts_per_rack: int | None = None
    bandwidth_between: str | None = None
    slow_host: str | None = None
    delay: str | None = None
    loss: str | None = None
    command: list[str] = field(default_factory=list)
    keep_command: bool = False
    plugins: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        opening, strategy = max((opening_steps_of(name), name) for name in self.strategies)
        if not self.warmup < self.steps:
            raise UsageError(f"--steps {self.steps} leaves nothing after --warmup {self.warmup}")
        if not self.warmup + opening < self.steps:
            raise UsageError(
                f"{self.steps} steps leave nothing after --warmup {self.warmup} and the {opening} "
                f"opening steps of {strategy}"
            )

    def recorded(self) -> dict[str, Any]:
        """The settings as they are recorded: without secrets in the commands."""
        values = asdict(self)
        if not self.keep_command:
            values["command"] = masked_command(self.command)
            values["also"] = {name: masked_command(words) for name, words in self.also.items()}
        return values

    @property
    def is_masked(self) -> bool:
        """Whether the commands, read from a record, have words that cannot be passed to a job."""
        return any(map(is_masked, (self.command, *self.also.values())))

    def command_of(self, strategy: str) -> list[str]:
        """The user's own job in a row; empty for a workload."""
        return self.also.get(strategy, self.command)

    def measured_steps(self, strategy: str) -> range:
        """The steps that are measured: those after the warm-up and the strategy's opening steps.

        If a strategy exchanges in some steps only, the first ones are left out where that leaves
        whole cycles, so that means over steps contain each kind of step in its share.

        Args:
            strategy: The strategy's spec, or the name of another row.
        """
        cycle = cycle_steps_of(strategy)
        first = self.warmup + opening_steps_of(strategy)
        after = self.steps - first
        return range(first + (after % cycle if after > cycle else 0), self.steps)


@dataclass(frozen=True)
class PlannedRun:
    """One planned run.

    Attributes:
        strategy: The strategy's spec.
        round: Number of the round, from 1.
        seed: Seed of the weights, the data's split and order: the same for all runs of a round.
        name: Name of the run's trace directory; unique in the experiment.
    """

    strategy: str
    round: int
    seed: int
    name: str


def plan_runs(settings: Settings) -> list[PlannedRun]:
    """All runs, round by round.

    Every round runs each strategy once, so that a drift of the machine or of the network hits
    all strategies alike. Each round begins with another strategy, so that none is always the
    first one.
    """
    names = _directory_names(settings.strategies)
    runs = []
    for number in range(settings.repeats):
        first = number % len(settings.strategies)
        for strategy in (*settings.strategies[first:], *settings.strategies[:first]):
            suffix = f".r{number + 1}" if number else ""
            runs.append(
                PlannedRun(strategy, number + 1, settings.seed + number, names[strategy] + suffix)
            )
    return runs


def _directory_names(specs: Sequence[str]) -> dict[str, str]:
    """A name of letters, digits, ``.``, ``-`` and ``_`` for each strategy, all different."""
    names: dict[str, str] = {}
    for spec in specs:
        name = re.sub(r"[^A-Za-z0-9._]+", "-", spec)
        same = sum(taken == name or taken.startswith(f"{name}-same") for taken in names.values())
        names[spec] = f"{name}-same{same + 1}" if same else name
    return names
