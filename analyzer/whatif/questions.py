"""Questions about a job, and their answers: how long a step would take.

A question changes the program of a trace (`program.py`) or the network, and the replay says how
long a step takes then. `step_us` is the time per step: the median over steps of the time between
the ends of two steps on their last ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.analyzer.analysis import join_steps
from ddltrace.analyzer.compare.run_noise import IDLE
from ddltrace.analyzer.events.event_columns import NULL, FloatArray, IntArray
from ddltrace.analyzer.events.interval_sets import EMPTY, Spans, length_before
from ddltrace.analyzer.formatting.quantities import parse_time
from ddltrace.analyzer.formatting.units import share_text, time_text
from ddltrace.analyzer.joined.rendezvous import TREE, links
from ddltrace.analyzer.measures.measure import JoinedSteps
from ddltrace.analyzer.measures.processor_time import HostUse, host_uses, processors_of
from ddltrace.analyzer.whatif.calibration import FILE, Calibration, read_calibration
from ddltrace.analyzer.whatif.costs import (
    HIDDEN,
    PAYLOAD,
    Network,
    bytes_on_link,
    fit,
    messages_in_a_row,
    small_overheads,
)
from ddltrace.analyzer.whatif.program import (
    LAUNCH,
    SIGNAL,
    Exchange,
    Items,
    Program,
    consecutive,
    find_program,
    periods,
    step_bounds,
)
from ddltrace.analyzer.whatif.replay import Replay, Replayed
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.extensions import require_extension

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

CATEGORIES: Final = ("compute", "update", "data", "copy", "host")
WARN: Final = 0.02
REFUSE: Final = 0.1
"""A replay of the unmodified steps that is further off than this warns, or answers nothing."""

PER_DOUBLING: Final = 0.25
"""By how much the transfer among twice as many ranks may differ from the ring's formula.

Covers 9 of 10 all-reduces on 3 to 8 A100s, taken by the formula from those of the same size on 2 to
4 (VIA-Research/vTrain, `trace/a100`, 1 MiB to 1 GiB): most are 0 to 20 % shorter than that."""

_PROCESSORS: Final = (0.75, 1.5)
"""By which factors the processors' work for messages may differ from what is known of it.

Calibrations of one machine differed by up to 30 %; in a job the engine's threads take more."""

_STRATEGY: Final = 0.05
"""The error of a predicted strategy that costs do not explain: the median of the first 51 in
docs/whatif-accuracy.md."""

_BUSY: Final = 0.65
"""The share of a message's fitted overhead for which its processors are busy.

12 more messages of a step, of 4.7 ms each, took 37 ms of processor time (``fifo`` beside ``ddp``, 4
ranks on two processors)."""

_TURNS: Final = 1.15
"""A step with messages takes at least this many times as long as the processors that ranks share
are busy, unless the trace shows less.

48 runs of 15 codecs and of ``accumulate``: 1.15 in the median, 1.09 to 1.20 in 9 of 10 (vgg at 1
Gbit/s, 4 ranks on two processors)."""

_CROWDED: Final = 1.5
"""The overhead of a message grows with this power of the ranks that share a processor.

Ranks wait at each message for threads that wait for a processor. On two processors, the overhead on
4 ranks was some 4 times that on 2, which is a power of 2; with this, DDP's step on 6 ranks,
predicted from 2, came out too long by half."""

_NORMAL_90: Final = 1.645 / 2.576
"""Half the width of a normal distribution's 90 % interval over that of its 99 % interval."""

_DRAWS: Final = 200

_NEVER: Final = 1 << 40
"""A period that is longer than any job."""


class Refused(Exception):
    """The trace does not hold the answer; the message says why."""


@dataclass(frozen=True)
class Question:
    """What is to be different; everything that is None stays as it is.

    Attributes:
        strategy: A strategy, as ``ddltrace experiment run --strategy`` takes it.
        ranks: Number of ranks, each with its batch as now.
        hosts: Number of hosts, with the same number of ranks each.
        bandwidth: Of each host's link, bits per second.
        latency: One way between hosts, seconds.
        without_straggler: A rank that works as the others do.
        straggler: A rank, and by how many seconds it takes longer in each step.
        faster: Names of layers, kernels or categories, and by which factor each is faster.
        batch_size: Examples in a rank's batch.
        accumulate: Batches for each exchange and update.
    """

    strategy: str | None = None
    ranks: int | None = None
    hosts: int | None = None
    bandwidth: float | None = None
    latency: float | None = None
    without_straggler: int | None = None
    straggler: tuple[int, float] | None = None
    faster: tuple[tuple[str, float], ...] = ()
    batch_size: int | None = None
    accumulate: int | None = None

    @property
    def asks_network(self) -> bool:
        """Whether messages do not take their recorded times."""
        changes = (self.strategy, self.bandwidth, self.latency, self.hosts)
        return any(change is not None for change in changes)

    def to_json(self) -> dict[str, Any]:
        """The options that are given, by name."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value not in (None, ())}


def read_straggler(text: str) -> tuple[int, float]:
    """Reads ``RANK=TIME``: the rank, and seconds.

    Raises:
        UsageError: It is not of that form.
    """
    rank, separator, time = text.partition("=")
    if not separator or not rank.strip().isdecimal():
        raise UsageError(f"--straggler {text!r:.40}: write RANK=TIME, such as 1=40ms")
    return int(rank), parse_time(time, "--straggler")


def read_faster(text: str) -> tuple[str, float]:
    """Reads ``NAME=FACTOR``.

    Raises:
        UsageError: It is not of that form.
    """
    name, _, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        value = 0.0
    if not name or not 0 < value < math.inf:
        raise UsageError(f"--faster {text!r:.40}: write NAME=FACTOR, such as backward=1.5")
    return name, value


def describe(question: Question) -> str:
    """A question in words, as its options."""
    parts = []
    for name, value in question.to_json().items():
        if name == "faster":
            parts += [f"{each}={factor:g}" for each, factor in value]
        elif name == "straggler":
            parts.append(f"straggler {value[0]}={time_text(value[1] * 1e6)}")
        elif name == "bandwidth":
            parts.append(f"{value / 1e9:g} Gbit/s")
        elif name == "latency":
            parts.append(f"latency {time_text(value * 1e6)}")
        else:
            parts.append(value if name == "strategy" else f"{name.replace('_', '-')} {value}")
    return ", ".join(parts)


@dataclass(frozen=True)
class Answer:
    """How long a step would take.

    Attributes:
        question: The question.
        step_us: Time per step; None if refused.
        low_us: Lower end of the 90 % interval.
        high_us: Upper end.
        speedup: Time per step now, divided by `step_us`.
        compute_us: By how much a rank works longer in a step, mean over ranks and steps.
        wait_us: By how much a rank waits longer for messages.
        crowding_us: By how much longer than that a step takes because ranks and messages share
            processors.
        refused: Why there is no answer; None if there is one.
    """

    question: Question
    step_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    speedup: float | None = None
    compute_us: float | None = None
    wait_us: float | None = None
    crowding_us: float | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As ``ddltrace whatif --json`` prints it."""
        times = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return {"question": self.question.to_json(), **times}


@dataclass(frozen=True)
class Edit:
    """What a strategy makes of a program.

    Attributes:
        program: The program.
        work: Own work before each item, one array per rank.
        cycle: Steps after which its exchanges repeat: the mean over them is the time per step.
        more_us: By how much a step may take longer, for reasons that the trace does not show.
        less_us: By how much it may be shorter.
    """

    program: Program
    work: list[FloatArray]
    cycle: int = 1
    more_us: float = 0.0
    less_us: float = 0.0


@dataclass(frozen=True)
class _Case(Edit):
    """What is replayed for an answer.

    Attributes:
        network: What messages cost; None where they take their recorded transfers.
        like_others: Ranks that work as the others do from now on.
        batches: How many a step has for each of the trace.
    """

    network: Network | None = None
    like_others: tuple[int, ...] = ()
    batches: int = 1


class WhatIf:
    """Answers questions about a trace.

    Attributes:
        program: What is replayed.
        baseline_us: Time per step in the trace.
        self_replay_error: How far a replay of the unmodified steps is off, as a share.
        answers_anyway: Whether to answer even if that is more than `REFUSE`.
        times_codecs: Whether to time a codec that is not calibrated on this machine, which takes
            seconds, or to refuse it.
    """

    def __init__(self, joined: JoinedSteps) -> None:
        self._joined = joined
        self.answers_anyway = False
        self.times_codecs = True
        self.program = find_program(joined)
        names = sorted(set(self.program.hosts))
        self._hosts = tuple(names.index(host) for host in self.program.hosts)
        self._machines = _machines(joined)
        self._as_is = Replay(self.program).run()
        self.baseline_us = float(np.median(periods(self.program.recorded))) / 1e3
        replayed = float(np.median(periods(self._as_is.ends))) / 1e3
        self.self_replay_error = replayed / self.baseline_us - 1
        fits = (
            fit(self.program, self._as_is, self._hosts, self._machines, overhead)
            for overhead in small_overheads(joined.joined)
        )
        self._networks = list(dict.fromkeys(each for each in fits if each is not None))
        self._calibration: Calibration | None = None
        self._uses: list[HostUse] | None = None
        self._fitted: dict[tuple[bool, Network], tuple[float, Replayed]] = {}

    @property
    def network(self) -> Network | None:
        """What messages cost in the trace, as far as it is known."""
        return self._networks[0] if self._networks else None

    def use_calibration(self, calibration: Calibration) -> None:
        """Takes the measured overhead of a message; the time of a byte stays that of the trace."""
        self._calibration = calibration
        overhead = calibration.overhead_ns(len(self.program.ranks))
        found = fit(
            self.program, self._as_is, self._hosts, self._machines, overhead, is_measured=True
        )
        self._networks = [] if found is None else [found]

    def ask_strategies(self, question: Question, specs: Sequence[str]) -> list[Answer]:
        """Answers a question for each of some strategies: the fastest first, then the refused."""
        answers = [self.ask(replace(question, strategy=spec)) for spec in specs]
        return sorted(answers, key=lambda each: (each.refused is not None, each.step_us or 0.0))

    def ask(self, question: Question) -> Answer:
        """Answers a question."""
        try:
            return self._answer(question)
        except Refused as reason:
            return Answer(question, refused=str(reason))

    def predict(self, question: Question) -> tuple[Program, Replayed]:
        """Replays a question once with its likely costs, and keeps what each rank does.

        Raises:
            Refused: The trace does not hold the answer.
        """
        case, hosts, _, crowding = self._case(question)
        if question.asks_network:
            network = self._known_network(question, hosts)
            likely, _, _ = self._ns_per_byte(question, network)
            case = replace(case, network=self._there(question, network, likely, hosts, crowding))
        links = None if case.network is None else case.network.use
        return case.program, Replay(case.program, case.work, links, keeps_items=True).run()

    def _answer(self, question: Question) -> Answer:
        case, hosts, spread, crowding = self._case(question)
        if not question.asks_network:
            return self._compare(question, case, spread)
        steps = len(self.program.steps) - 1
        if case.cycle <= steps:
            return self._on_network(question, case, hosts, spread, crowding)
        # What messages add to a step is taken to be in proportion to how often they are sent.
        often, never = (
            self._on_network(question, *self._case(question, period)) for period in (steps, _NEVER)
        )
        return _between(never, often, steps / case.cycle)

    def _case(
        self, question: Question, period: int | None = None
    ) -> tuple[_Case, tuple[int, ...], float, float]:
        """What to replay; the hosts; how uncertain messages are; see `_crowding`.

        Args:
            period: After how many steps the strategy's messages repeat, in place of its own period.
        """
        if not question.to_json():
            raise Refused("nothing is asked: give at least one option")
        if abs(self.self_replay_error) > REFUSE and not self.answers_anyway:
            raise Refused(
                f"a replay of the unmodified steps is {share_text(abs(self.self_replay_error))} "
                "off: the trace does not explain its own steps"
            )
        work = [items.work.copy() for items in self.program.items]
        for name, factor in question.faster:
            self._make_faster(work, name, factor)
        if question.batch_size is not None:
            self._scale_batch(work, question.batch_size)
        if question.without_straggler is not None:
            self._level(work, question.without_straggler)
        if question.straggler is not None:
            self._delay(work, *question.straggler)
        if question.accumulate is not None:
            self._accumulate(work, question.accumulate)
        edit, hosts = Edit(self.program, work), self._hosts_in(question)
        if question.strategy is not None:
            strategies = require_extension("whatif", "--strategy")
            edit = strategies.apply(
                self._joined,
                self.program,
                work,
                question.strategy,
                network=None if self.network is None else replace(self.network, hosts=hosts),
                ranks=len(hosts),
                calibration=self._calibration,
                times_codecs=self.times_codecs,
                quiet=self._quiet(self.network),
                period=period,
            )
        program, work = edit.program, edit.work
        ranks, spread = len(hosts), 0.0
        crowding = self._crowding(ranks, question.hosts)
        if ranks != len(program.ranks):
            program, work = self._resize(program, work, hosts, crowding)
            spread = PER_DOUBLING * abs(math.log2(ranks / len(self.program.ranks)))
            spread += PER_DOUBLING if crowding != 1 else 0.0
        else:
            work = [mine * crowding for mine in work]
        like_others = () if question.without_straggler is None else (question.without_straggler,)
        case = _Case(
            program,
            work,
            edit.cycle,
            edit.more_us,
            edit.less_us,
            like_others=like_others,
            batches=question.accumulate or 1,
        )
        return case, hosts, spread, crowding

    # --- how long a step takes -----------------------------------------------------------------

    def _compare(self, question: Question, case: _Case, spread: float) -> Answer:
        """Answers with recorded transfers, which more or fewer ranks may change by `spread`."""
        replayed = self._replay(case)
        times = [self._step_us(case, replayed)]
        for factor in (1 - spread, 1 + spread) if spread else ():
            program = replace(
                case.program,
                exchanges=[
                    replace(each, transfer=each.transfer * factor)
                    for each in case.program.exchanges
                ],
            )
            times.append(self._step_us(case, self._replay(replace(case, program=program))))
        own = 1 / (1 + self.self_replay_error)
        times = [time * own for time in times]
        return self._with_interval(question, case, replayed, times, reference=self._as_is)

    def _on_network(
        self,
        question: Question,
        case: _Case,
        hosts: tuple[int, ...],
        spread: float,
        crowding: float,
    ) -> Answer:
        """Answers with the messages on links: the ratio to the same model of the job as it is."""
        self._known_network(question, hosts)
        times, replays = [], []
        for number, network in enumerate(self._networks):
            fitted, _ = self._as_fitted(question.strategy is not None, network)
            likely, low, high = self._ns_per_byte(question, network)
            there = self._there(question, network, likely, hosts, crowding)
            costs = [there] if number == 0 else []
            rates = [low * (1 - spread), high * (1 + spread)]
            costs += [replace(there, ns_per_byte=rate) for rate in rates]
            if there.machines:
                costs += [replace(there, hidden=hidden) for hidden in HIDDEN[1:]]
                costs += [replace(there, scale=factor) for factor in _PROCESSORS]
            for cost in costs:
                asked = replace(case, network=cost)
                replays.append(self._replay(asked))
                time = self._step_us(case, replays[-1]) * self.baseline_us / fitted
                times.append(max(time, self._processors_us(question, asked, network)))
            # The model may be as wrong there as it is on the job as it is.
            error = abs(fitted / self.baseline_us - 1)
            if question.strategy is not None:
                error = max(error, _STRATEGY)
            times += [times[0] * (1 - error), times[0] * (1 + error)]
        times += [times[0] + case.more_us, times[0] - case.less_us]
        fitted, reference = self._as_fitted(question.strategy is not None, self._networks[0])
        uncrowded = self._step_us(case, replays[0]) * self.baseline_us / fitted
        found = self._with_interval(question, case, replays[0], times, reference=reference)
        return replace(found, crowding_us=times[0] - uncrowded)

    def _as_fitted(self, is_strategys: bool, network: Network) -> tuple[float, Replayed]:
        """Time per step, us, of the job as it is in the model, and its replay.

        Args:
            is_strategys: Whether DDP's own messages are made as those of a strategy are, so that
                what this leaves out is left out of both.
            network: What messages cost.
        """
        key = is_strategys, network
        if key not in self._fitted:
            program, work = self.program, [items.work for items in self.program.items]
            if is_strategys:
                strategies = require_extension("whatif", "--strategy")
                edit = strategies.apply(
                    self._joined,
                    program,
                    work,
                    strategies.PLAIN,
                    network=network,
                    ranks=len(program.ranks),
                )
                if _sent(edit.program) == _sent(program):
                    program, work = edit.program, edit.work
            case = _Case(program, work, network=network)
            replayed = self._replay(case)
            self._fitted[key] = self._step_us(case, replayed), replayed
        return self._fitted[key]

    def _known_network(self, question: Question, hosts: tuple[int, ...]) -> Network:
        """What messages cost in the trace.

        Raises:
            Refused: That is not known, or does not tell what is asked.
        """
        if self.network is None:
            raise Refused("the trace holds no sizes of messages: what links cost is not known")
        on_links = (question.bandwidth, question.latency, question.hosts) != (None,) * 3
        if len(set(hosts)) < 2 and on_links:
            raise Refused("all ranks are on one host: say on how many they would be (--hosts)")
        return self.network

    def _there(
        self,
        question: Question,
        network: Network,
        ns_per_byte: float,
        hosts: tuple[int, ...],
        crowding: float,
    ) -> Network:
        """What messages would cost."""
        machines = self._machines
        if machines and hosts != self._hosts:
            # Hosts that are emulated on one machine share its processors.
            one = len(set(machines)) < len(set(self._hosts))
            machines = (0,) * len(hosts) if one else hosts
        overhead, latency = network.overhead_ns * crowding**_CROWDED, 0.0
        if question.latency is not None:
            overhead = overhead if machines else 0.0
            latency = question.latency * 1e9
        return Network(overhead, ns_per_byte, hosts, machines, latency)

    def _processors_us(self, question: Question, case: _Case, network: Network) -> float:
        """The least time per step of machines whose processors ranks and messages share.

        From the processor time that the ranks used, less what their messages took, plus what those
        of the case take. 0 where that is not known, or where ranks leave processors to messages.
        """
        asked = case.network
        assert asked is not None
        if not asked.machines or question.straggler or question.without_straggler is not None:
            return 0.0
        used, own = self._used_us(), self._own_us(network)
        if used is None or own is None:
            return 0.0
        recorded = self._recorded_work_ns()
        worked = sum(float(work.sum()) for work in case.work) / len(case.work)
        grown = len(case.program.ranks) / len(self.program.ranks)
        grown *= len(set(self._machines)) / len(set(asked.machines))
        grown *= worked / recorded if recorded else 1.0
        turns = min(_TURNS, max(self.baseline_us / used, 1.0)) if used else _TURNS
        # In steps without messages, no rank waits for its turn.
        busy = (1 + (turns - 1) / case.cycle) * own * grown
        return (busy + turns * _busy_us(case.program, asked)) / case.batches

    def _own_us(self, network: Network) -> float | None:
        """As `_used_us`, without the messages of the trace."""
        used = self._used_us()
        return None if used is None else max(used - _busy_us(self.program, network), 0.0)

    def _used_us(self) -> float | None:
        """The processor time of the ranks of a machine in a step, by processor.

        None where that is not known, or where ranks leave processors to messages.
        """
        ranks, uses = len(self.program.ranks), self._host_uses()
        processors = max((use.processors for use in uses), default=0)
        used = [us for use in uses for us in use.used_us.values()]
        machines = len(set(self._machines))
        if len(used) < ranks or ranks / machines < processors:
            return None
        return float(np.mean(used)) * ranks / machines / processors

    def _recorded_work_ns(self) -> float:
        """A rank's own work in all recorded steps, mean over ranks."""
        return sum(float(items.work.sum()) for items in self.program.items) / len(
            self.program.items
        )

    def _quiet(self, network: Network | None) -> float:
        """The share of its time that a rank's own work takes if no messages use processors.

        Where ranks leave no processor to messages, they then take turns without pause. 1 where that
        is not known.
        """
        own = None if network is None or not network.machines else self._own_us(network)
        each = self._recorded_work_ns() / len(self.program.steps) / 1e3
        return 1.0 if own is None or not each else min(own / each, 1.0)

    def _ns_per_byte(self, question: Question, network: Network) -> tuple[float, float, float]:
        """What a byte costs on the links: likely, at least and at most, ns.

        The fitted cost contains what processors spend on it, and on several hosts the link that the
        trace was recorded on. How much of it is which is not known, nor how much of the former is
        hidden behind the new link.
        """
        fitted = network.ns_per_byte
        if question.bandwidth is None:
            return fitted, fitted, fitted
        wire = 8e9 / (question.bandwidth * PAYLOAD)
        if len(set(self._hosts)) == 1:
            return max(wire, fitted) + min(wire, fitted) / 2, max(wire, fitted), wire + fitted
        return wire, wire, wire + fitted / 4

    def _replay(self, case: _Case) -> Replayed:
        try:
            links = None if case.network is None else case.network.use
            return Replay(case.program, case.work, links).run()
        except TraceError as error:
            raise Refused(str(error)) from error

    def _step_us(self, case: _Case, replayed: Replayed) -> float:
        time = float(np.median(_cycles(case, replayed))) / 1e3 / case.batches
        return max(time, self._least_us(case))

    def _least_us(self, case: _Case) -> float:
        """The least time per step by processor time, if a late rank is as the others."""
        if not case.like_others:
            return 0.0
        return max(
            (use.step_us - use.most_saved_us(case.like_others) for use in self._host_uses()),
            default=0.0,
        )

    def _host_uses(self) -> list[HostUse]:
        if self._uses is None:
            self._uses = host_uses(self._joined.trace, self._joined.steady)
        return self._uses

    def _with_interval(
        self,
        question: Question,
        case: _Case,
        replayed: Replayed,
        times: Sequence[float],
        *,
        reference: Replayed,
    ) -> Answer:
        """Adds what steps and runs differ by.

        Args:
            case: What was replayed.
            replayed: The replay of the first of the times.
            times: The answer, and what it may be by the costs.
            reference: The replay of the job as it is, with messages that cost what they do there.
        """
        random = np.random.default_rng(0)
        steps = _cycles(case, replayed)
        drawn = np.median(random.choice(steps, (_DRAWS, len(steps))), axis=1) / np.median(steps)
        by_steps = np.quantile(drawn, (0.05, 0.95)) - 1
        noise = math.hypot(IDLE.step * _NORMAL_90, self.self_replay_error)
        step = times[0]
        less = math.hypot(float(by_steps[0]), noise)
        more = math.hypot(float(by_steps[1]), noise)
        return Answer(
            question,
            step_us=step,
            low_us=max(min(times) * (1 - less), 0.0),
            high_us=max(times) * (1 + more),
            speedup=self.baseline_us / step if step else None,
            compute_us=_mean_us(replayed.worked) / case.batches - _mean_us(reference.worked),
            wait_us=_mean_us(replayed.waited) / case.batches - _mean_us(reference.waited),
            crowding_us=0.0,
        )

    # --- changes of the ranks' own work --------------------------------------------------------

    def _within(self, work: list[FloatArray], spans: Callable[[int], Spans]) -> list[FloatArray]:
        """How much of the work before each item lies in some times of its rank, ns."""
        found = []
        for rank, items, mine in zip(self.program.ranks, self.program.items, work, strict=True):
            own = spans(rank)
            part = length_before(own, items.until) - length_before(own, items.begin)
            recorded = np.maximum(items.work, 1.0)
            found.append(part * (mine / recorded))
        return found

    def _make_faster(self, work: list[FloatArray], name: str, factor: float) -> None:
        if factor <= 0:
            raise Refused(f"--faster {name}={factor:g}: a factor is more than 0")
        spans = self._in_category(name) if name in CATEGORIES else self._named(name)
        for place, part in enumerate(self._within(work, spans)):
            work[place] -= part * (1 - 1 / factor)

    def _named(self, name: str) -> Callable[[int], Spans]:
        """The times of a layer or kernel on each rank."""
        lines = {rank: scan.timeline for rank, scan in self._joined.scans.items()}
        if any(line is None for line in lines.values()):
            raise Refused(f"{name}: layers and kernels are not known in a trace of so many ranks")
        known = {each for line in lines.values() if line is not None for each in line.names}
        if name not in known:
            shown = ", ".join(sorted(known)[:8])
            raise Refused(f"no layer, kernel or category is called {name}; there are {shown}, ...")

        def spans(rank: int) -> Spans:
            line = lines[rank]
            assert line is not None
            if name not in line.names:
                return EMPTY
            return line.segments.spans(line.segments.name == line.names.index(name))

        return spans

    def _scale_batch(self, work: list[FloatArray], size: int) -> None:
        now = batch_size_of(self._joined.trace.run.command)
        if now is None:
            raise Refused(
                "the trace does not hold the batch size now: the job's command has no --batch-size"
            )
        for name in ("compute", "data", "copy"):
            self._make_faster(work, name, now / size)

    def _accumulate(self, work: list[FloatArray], batches: int) -> None:
        """Adds the work of further batches before that of the last, which is exchanged."""
        parts = [np.zeros_like(mine) for mine in work]
        for name in ("compute", "data", "copy", "host"):
            own = self._within(work, self._in_category(name))
            parts = [sum_ + each for sum_, each in zip(parts, own, strict=True)]
        for items, mine, part in zip(self.program.items, work, parts, strict=True):
            first = _first_of_steps(items)
            mine[first] += np.add.reduceat(part, first) * (batches - 1)

    def _in_category(self, name: str) -> Callable[[int], Spans]:
        return lambda rank: self._joined.work[rank][name]

    def _delay(self, work: list[FloatArray], rank: int, seconds: float) -> None:
        place = self._place(rank)
        work[place][_first_of_steps(self.program.items[place])] += seconds * 1e9

    def _place(self, rank: int) -> int:
        if rank not in self.program.ranks:
            raise Refused(f"the trace has no rank {rank}")
        return self.program.ranks.index(rank)

    def _level(self, work: list[FloatArray], rank: int) -> None:
        """Gives a rank, between two launches, the median of the other ranks' work there."""
        place = self._place(rank)
        mine = _between_launches(self.program.items[place], work[place])
        others = [
            found
            for other in range(len(work))
            if other != place
            for found in [_between_launches(self.program.items[other], work[other])]
            if np.array_equal(found.key, mine.key)
        ]
        if not others:
            raise Refused(
                f"no other rank sends the messages of rank {rank}: none to compare it with"
            )
        usual = np.median([each.sums for each in others], axis=0)
        ratio = np.minimum(usual / np.maximum(mine.sums, 1.0), 1.0)
        work[place] *= ratio[mine.of_item]

    # --- another number of ranks ---------------------------------------------------------------

    def _crowding(self, ranks: int, hosts: int | None) -> float:
        """How many times as many ranks share a processor as now; 1 where that is not known.

        A machine with as many processors as ranks, or more, is not crowded.
        """
        trace = self._joined.trace
        processors = processors_of(trace, trace.ranks[0])
        machines = len(set(self._machines))
        if not processors or not machines:
            return 1.0
        now = len(self.program.ranks) / machines
        if machines < len(set(self._hosts)):  # they are emulated
            there = ranks / machines
        elif hosts is not None:
            there = ranks / hosts
        else:
            there = ranks if machines == 1 else now
        return max(there / processors, 1.0) / max(now / processors, 1.0)

    def _hosts_in(self, question: Question) -> tuple[int, ...]:
        """The host of each rank; of more ranks, as many are on each host as now."""
        now, ranks = len(self.program.ranks), question.ranks or len(self.program.ranks)
        if question.hosts is not None:
            return _on_hosts(ranks, question.hosts)
        if ranks == now:
            return self._hosts
        count = len(set(self._hosts))
        per_host = ranks if count == 1 else -(-now // count)
        return tuple(place // per_host for place in range(ranks))

    def _resize(
        self, program: Program, work: list[FloatArray], hosts: tuple[int, ...], crowding: float
    ) -> tuple[Program, list[FloatArray]]:
        """A program of more or fewer ranks.

        A new rank works as one of the recorded ranks did in another step, so that the maximum over
        more ranks grows as it does over draws; what all ranks of a step have in common stays.

        Args:
            work: Own work before each item of each rank.
            hosts: The host of each rank that there is to be.
            crowding: By which factor they work longer, see `_crowding`.
        """
        now, ranks = len(program.ranks), len(hosts)
        if ranks < 2 or now < 2:
            raise Refused("a job of one rank does not communicate: there is nothing to go by")
        if any(len(each.places) not in (1, now) for each in program.exchanges):
            raise Refused("the job has groups of some ranks: how they would grow is not known")
        count = len(program.steps)
        items = [program.items[place % now] for place in range(ranks)]
        total = np.array(
            [
                np.bincount(each.step, mine, minlength=count)[:count]
                for each, mine in zip(program.items, work, strict=True)
            ]
        )
        usual = np.median(total, axis=0)
        drawn = [
            work[place % now] * crowding
            if place < now
            else crowding * _of_other_steps(items[place], work[place % now], usual, place // now)
            for place in range(ranks)
        ]
        places = np.arange(ranks)
        grown = [
            self._grown(each, places, crowding) if len(each.places) == now else each
            for each in program.exchanges
        ]
        resized = replace(
            program,
            ranks=places.tolist(),
            hosts=[f"host {host}" for host in hosts],
            items=items,
            exchanges=grown,
            begin=program.begin[places % now],
            recorded=program.recorded[:, places % now],
        )
        return resized, drawn

    def _grown(self, exchange: Exchange, places: IntArray, crowding: float) -> Exchange:
        """An exchange of all ranks, with its time by the formula of its operation."""
        before, after = len(exchange.places), len(places)
        cost = self.network or Network(1.0, 1.0, ())

        def modelled(ranks: int, factor: float) -> float:
            size = bytes_on_link(exchange.op, ranks, exchange.bytes)
            rounds = messages_in_a_row(exchange.op, ranks)
            return replace(cost, overhead_ns=cost.overhead_ns * factor).alone_ns(rounds, size)

        now = modelled(before, 1.0)
        ratio = modelled(after, crowding**_CROWDED) / now if now else 1.0
        return replace(
            exchange,
            places=places,
            transfer=exchange.transfer[places % before] * ratio,
            needs=None if exchange.needs is None else _tree(after),
        )


def what_if(trace: Trace, steps: range | None = None, *, calibration: Path | None = None) -> WhatIf:
    """Joins the steps of a trace, to ask about them.

    Args:
        steps: Only these.
        calibration: The file of the calibration to use; by default the one in the trace's folder.

    Raises:
        TraceError: The trace has no steps that can be replayed.
        UsageError: The file of the calibration cannot be read.
    """
    asked = WhatIf(join_steps(trace, steps)[1])
    if calibration is None and isinstance(trace.path, Path) and (trace.path / FILE).is_file():
        calibration = trace.path / FILE
    if calibration is not None:
        asked.use_calibration(read_calibration(calibration))
    return asked


def recorded_us(trace: Trace, cycle: int) -> float:
    """The time per step that a trace shows: of the ranks that train, without servers.

    Args:
        cycle: Steps after which what the job does repeats.

    Raises:
        TraceError: The trace has no two steady steps in a row.
    """
    joined = join_steps(trace)[1]
    ranks = [rank for rank, scan in joined.scans.items() if len(scan.step)]
    numbers = consecutive(joined, len(ranks))
    ends = np.array([step_bounds(joined, rank, numbers)[1] for rank in ranks]).T
    steps = _by_cycle(periods(ends), cycle)
    if not len(steps):
        raise TraceError(f"the trace has fewer steps than a cycle of {cycle}")
    return float(np.median(steps)) / 1e3


def _cycles(case: _Case, replayed: Replayed) -> FloatArray:
    """The mean time per step of each cycle of a replay; of all steps if a cycle has more."""
    steps = periods(replayed.ends)
    return _by_cycle(steps, min(case.cycle, len(steps)))


def _between(never: Answer, often: Answer, share: float) -> Answer:
    """Interpolates the answer for messages of some frequency.

    Args:
        never: The answer without the messages.
        often: The answer with a higher frequency.
        share: The frequency asked about, divided by that of `often`.
    """
    times = {
        each.name: value + share * (getattr(often, each.name) - value)
        for each in fields(Answer)
        if isinstance(value := getattr(never, each.name), float)
    }
    baseline_us = (never.speedup or 0.0) * (never.step_us or 0.0)
    return replace(never, **times | {"speedup": baseline_us / times["step_us"]})


def _by_cycle(steps: FloatArray, cycle: int) -> FloatArray:
    """The mean time per step of each whole cycle."""
    whole = len(steps) // cycle
    return np.asarray(steps[: whole * cycle].reshape(whole, cycle).mean(axis=1))


@dataclass(frozen=True)
class _Sums:
    """A rank's work between the messages that it launches.

    Attributes:
        key: Step and message of each interval's end.
        sums: Work in each, ns.
        of_item: The interval of each item.
    """

    key: IntArray
    sums: FloatArray
    of_item: IntArray


def _between_launches(items: Items, work: FloatArray) -> _Sums:
    ends = (items.kind == LAUNCH) | (items.exchange == NULL)
    of_item = np.append(0, np.cumsum(ends)[:-1])
    sums = np.bincount(of_item, work, minlength=int(ends.sum())).astype(np.float64)
    key = np.stack([items.step[ends], items.exchange[ends]])
    return _Sums(key, sums, np.minimum(of_item, len(sums) - 1).astype(np.int64))


def _of_other_steps(items: Items, work: FloatArray, usual: FloatArray, offset: int) -> FloatArray:
    """A rank's work as in other steps, where these have as many items."""
    count = len(usual)
    bounds = np.searchsorted(items.step, np.arange(count + 1))
    found: FloatArray = work.copy()
    for step in range(count):
        other = (step + 7 * offset) % count
        mine = slice(bounds[step], bounds[step + 1])
        its = slice(bounds[other], bounds[other + 1])
        if np.array_equal(items.kind[mine], items.kind[its]):
            found[mine] = work[its] * (usual[step] / max(usual[other], 1.0))
    return found


def _first_of_steps(items: Items) -> IntArray:
    """The first item of each step."""
    return np.flatnonzero(np.append(True, np.diff(items.step) > 0))


def _tree(ranks: int) -> IntArray:
    """Who needs whom in a broadcast from the first rank along Gloo's binomial tree."""
    place = np.arange(ranks)
    below = np.stack([place, links(TREE, place, np.full(ranks, ranks))], axis=1)[1:]
    return np.concatenate([below, below[:, ::-1]])


def _sent(program: Program) -> int:
    """How many messages carry tensors."""
    return sum(each.op != SIGNAL and each.tensors > 0 for each in program.exchanges)


def _busy_us(program: Program, network: Network) -> float:
    """How long the processors of each machine are busy with the messages of a step."""
    work = sum(_busy_ns(each, network) for each in program.exchanges if each.op != SIGNAL)
    return work / len(program.steps) / 1e3


def _busy_ns(exchange: Exchange, network: Network) -> float:
    share = _BUSY if exchange.processor_ns is None else 1.0
    return share * network.processor_ns(exchange)


def _machines(joined: JoinedSteps) -> tuple[int, ...]:
    """As in `Network`: ranks of one machine share a clock."""
    trace = joined.trace
    infos = [trace.infos(rank)[-1] for rank in joined.joined.messages.ranks]
    if any((info.device or "cpu") != "cpu" for info in infos):
        return ()
    clocks = [info.clock_domain.partition(" ")[0] or info.host for info in infos]
    names = sorted(set(clocks))
    return tuple(names.index(clock) for clock in clocks)


def _on_hosts(ranks: int, hosts: int) -> tuple[int, ...]:
    if hosts < 1 or ranks % hosts:
        raise Refused(f"{ranks} ranks cannot be divided evenly among {hosts} hosts")
    return tuple(place // (ranks // hosts) for place in range(ranks))


def _mean_us(values: FloatArray) -> float:
    return float(values[1:].mean()) / 1e3 if len(values) > 1 else 0.0


def batch_size_of(command: Sequence[str]) -> int | None:
    """The batch size that a command gives: ``--batch-size N``, ``--batch_size=N``; None if none."""
    names = ("batch-size", "batchsize")
    for place, word in enumerate(command):
        name, _, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name.replace("_", "-").lower() in names:
            value = value or (command[place + 1] if place + 1 < len(command) else "")
            if value.isdecimal() and int(value):
                return int(value)
    return None
