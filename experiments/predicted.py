"""Strategies in ``ddltrace whatif``: takes DDP's messages out of a program and sends a strategy's.

The schedule's own plan and dispatcher decide, the objects that the engine runs; what a message
carries comes from the codec's own sizes, and which ranks exchange it from the architecture's own
rounds. The dispatcher of one rank stands for all: all ranks start their messages in the same order,
and a message proceeds when its last rank has come. Servers that update the parameters answer by the
state machine that they run in a job.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, FloatArray, IntArray, distinct
from ddltrace.analyzer.events.interval_sets import lengths_within
from ddltrace.analyzer.measures.measure import JoinedSteps
from ddltrace.analyzer.measures.processor_time import host_uses
from ddltrace.analyzer.whatif.calibration import Calibration
from ddltrace.analyzer.whatif.costs import Network, bytes_on_link, messages_in_a_row
from ddltrace.analyzer.whatif.program import (
    BESIDE,
    LAUNCH,
    SIGNAL,
    STEP_END,
    WAIT,
    Controller,
    Exchange,
    Items,
    Program,
    step_bounds,
)
from ddltrace.analyzer.whatif.questions import Edit, Refused
from ddltrace.experiments.architectures import placement
from ddltrace.experiments.architectures.auto import Auto, Links
from ddltrace.experiments.architectures.base import AnyArchitecture, Architecture
from ddltrace.experiments.architectures.hierarchical import Hierarchical, hosts_of
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.transfers import Round
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.codecs.half_precision import HalfPrecision
from ddltrace.experiments.frequency.frequency import Frequency, Periodic
from ddltrace.experiments.messages.message_plan import (
    Gradient,
    Message,
    MessagePlan,
    plan_in_order,
)
from ddltrace.experiments.schedules.base import Dispatcher, Schedule
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.spec import BASELINE, exchange_of, parse
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.synchronization.server_state import Answer, Decision, ServerState
from ddltrace.experiments.timed_here import codec_ns_per_element, mean_ns, own_update, rule_ns

_SEARCHED: Final = {
    "bucket": ("ddp:bucket_mb={}", (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100)),
    "slice": ("p3:slice={}", (5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)),
    "credit": ("bytescheduler:credit_mb={}", (0.5, 1, 2, 4, 8, 16, 32)),
}
_ENGINE_US: Final = 700.0
"""What the engine does for a message, at most, us, where it is not calibrated.

``wfbp`` on two ranks and two processors took 640 us more for each message than DDP."""

_GRADIENT_US: Final = 200.0
"""What the engine does for a gradient, at most, us, where it is not calibrated.

With 29 gradients in one message, ``ring`` on 4 ranks and two processors took up to 8 ms more than
DDP."""

_SLOWER_CODEC: Final = 4.0
"""How many times as long as alone, in a loop, a codec may take in a job: caches are cold, and ranks
share processors and memory. Assumed, not measured."""

_SLOWER_HERE: Final = 1.75
"""How many times as long as calibrated a codec may take in a job, beside the backward pass; and how
many times as long as timed here an update."""

_CAST_BYTES_PER_NS: Final = 1000.0
"""How many bytes per ns a device reads and writes while it casts gradients to 16 bits and back.

Assumed, not measured: devices since 2017 have memories of 300 (T4) to 4,800 (H200) bytes per ns.
The interval reaches to casts that take `_SLOWER_CODEC` times as long."""

_ONE_IN_FLIGHT: Final = 1.2
"""How many times as long as beside others a message takes that is the only one in flight.

A step of ``tictac`` took 1.19 to 1.31 times as long as one of ``wfbp`` with the same messages (vgg
and resnet at 1 Gbit/s, 5 rounds, 4 ranks on two processors)."""

_DELAYED_UPDATE: Final = 3.0
"""How many updates' time a delayed update adds: it saves the weights, takes a local step with the
rank's own gradients, and puts the weights back.

With 3, ``odsgd`` is predicted 7 % too short in one case and 7 % too long in another (resnet and vgg
at 1 Gbit/s, 4 ranks on two processors); without it, 16 and 14 % too short."""

_ALONE: Final = 0.6
"""The share by which a rank's own work may be shorter in steps without messages, if messages use
the ranks' processors: the library's threads then use none, and ranks that do not wait for each
other leave no processor idle.

With 4 ranks on two processors, ``localsgd`` and ``diloco`` took 28 to 34 % less than predicted in
one experiment (vgg), and 6 to 11 % less in others (digits)."""

_UNEVEN: Final = (0.05, 1.95)
"""The weights of messages to and from servers, of which several share a link: TCP's flows do not
share it evenly, so workers that have started together do not end together. Drawn for each message.

With equal weights, workers stay in step and use one direction of a link at a time: ``asp`` is
predicted 69 % too long and ``ssp`` 25 %, with these 8 and 10 % (vgg at 400 Mbit/s, one run)."""

PLAIN: Final = BASELINE
"""The strategy of a job that has none."""

_AXES: Final = ("order", "volume", "architecture", "frequency", "synchronization")


def apply(
    joined: JoinedSteps,
    program: Program,
    work: list[FloatArray],
    spec: str,
    *,
    network: Network | None,
    ranks: int,
    calibration: Calibration | None = None,
    times_codecs: bool = True,
    quiet: float = 1.0,
    period: int | None = None,
) -> Edit:
    """Replaces the gradient messages of a program by those of a strategy.

    Args:
        work: Own work before each item of each rank.
        spec: The strategy.
        network: What messages cost; its hosts are those of the ranks that exchange them.
        ranks: How many ranks exchange the messages: the program is resized afterwards.
        calibration: What the engine's messages take of processors, where it is measured.
        times_codecs: Whether to time a codec here that is not calibrated.
        quiet: The share of its time that a rank's own work takes where no messages use processors.
        period: After how many steps parameters are averaged, in place of the strategy's own period.

    Raises:
        Refused: The trace does not hold what the strategy would do to the job.
        UsageError: It is not a strategy.
    """
    strategy = parse(spec)
    _check(joined, strategy)
    if period is not None:
        strategy = _with_period(strategy, period)
    gradients = _gradients(joined, program)
    if network is None:
        raise Refused("the trace holds no sizes of messages: what messages cost is not known")
    return _kind(strategy)(
        joined,
        program,
        work=work,
        strategy=strategy,
        gradients=gradients,
        network=network,
        ranks=ranks,
        calibration=calibration,
        times_codecs=times_codecs,
        quiet=quiet,
    ).edit()


def applicable() -> list[str]:
    """The specs of all techniques with their defaults, as far as they can be predicted."""
    return [
        entry.name
        for entry in techniques()
        if entry.build is not None and entry.axis in _AXES and not entry.modifier
    ]


def settings(what: str) -> list[str]:
    """The specs among which a search looks.

    Args:
        what: ``bucket``, ``slice`` or ``credit``.
    """
    form, values = _SEARCHED[what]
    return [form.format(value) for value in values]


def _check(joined: JoinedSteps, strategy: Strategy) -> None:
    """Refuses what a trace does not show."""
    if strategy.parallelism is not None:
        raise Refused("how the model would be divided is not in the trace")
    if strategy.transport is not None:
        raise Refused("what another library costs is not in the trace")
    if isinstance(strategy.schedule, Poseidon):
        raise Refused("which layers send factors depends on the batch, which is not in the trace")
    if strategy.schedule.search() is not None:
        raise Refused("it searches while the job runs: ask with --search, or for one setting")
    if _is_on_cpu(joined):
        return
    casts = isinstance(strategy.codec, HalfPrecision) and strategy.feedback is None
    if strategy.encodes and not casts:
        raise Refused("what encoding costs on this device is not known")
    own = strategy.optimizer_rule is not None or strategy.exchanges == "momentum"
    if own or strategy.place in ("servers", "peers"):
        raise Refused("what its update costs on this device is not known")


def _is_on_cpu(joined: JoinedSteps) -> bool:
    """Whether the job trains on CPUs."""
    return joined.trace.infos(joined.trace.ranks[0])[-1].device == "cpu"


def _kind(strategy: Strategy) -> type[_Exchanged]:
    """The class that makes the program of a strategy.

    Raises:
        Refused: Its rule of synchronization is not simulated.
    """
    if strategy.place == "servers":
        return _Served
    for rule, kind in {Gossip: _Neighbours, AdPsgd: _Pairs, Grouped: _Grouped}.items():
        if isinstance(strategy.synchronization, rule):
            return kind
    if strategy.place != "all":
        raise Refused("when its workers would go on is not simulated: experiment run measures it")
    return _Exchanged if strategy.schedule.cycle_ms is None else _Fused


def _with_period(strategy: Strategy, period: int) -> Strategy:
    """The same with another period between averages of parameters.

    Raises:
        Refused: It averages gradients, or groups do.
    """
    frequency = strategy.frequency
    if not isinstance(frequency, Periodic):
        raise Refused(f"the trace has fewer steps than a cycle of {strategy.cycle_steps}")
    try:
        return replace(strategy, frequency=replace(frequency, period=period))
    except ValueError as error:
        raise Refused(f"the trace has fewer steps than it needs: {error}") from error


def _gradients(joined: JoinedSteps, program: Program) -> list[Gradient]:
    """The gradients of the job's model, in the order in which they become ready.

    Raises:
        Refused: The trace does not show when they are ready, or what sends them.
    """
    trace = joined.trace
    rank = program.ranks[0]
    scan = joined.scans[rank]
    rows = np.isin(scan.gradient_step, program.steps)
    if not rows.any():
        raise Refused("the trace does not show when gradients are ready")
    if any(len(each.places) != len(program.ranks) for each in program.exchanges if each.tensors):
        raise Refused("not all ranks exchange the gradients")
    if not any(_carries_gradients(each) for each in program.exchanges):
        raise Refused("no message of the trace is DistributedDataParallel's all_reduce")
    known = {info.id: info for info in trace.tensors(rank)}
    first = np.searchsorted(scan.step, scan.gradient_step[rows])
    since = scan.gradient_time[rows] - scan.step_start[np.minimum(first, len(scan.step) - 1)]
    tensors = scan.gradient_tensor[rows]
    found = []
    for tensor in distinct(tensors).tolist():
        info = known[tensor]
        ready = float(np.median(since[tensors == tensor]))
        elements = int(np.prod(info.shape)) if info.shape else 1
        found.append((ready, tensor, info, elements))
    found.sort(key=lambda each: each[:2])
    return [
        Gradient(
            index=tensor,
            name=info.name,
            elements=elements,
            element_bytes=max(info.bytes // max(elements, 1), 1),
            dtype=info.dtype,
            shape=tuple(info.shape),
            ready_us=ready / 1e3,
        )
        for ready, tensor, info, elements in found
    ]


def _carries_gradients(exchange: Exchange) -> bool:
    return exchange.tensors > 0 and exchange.op == "all_reduce"


@dataclass(frozen=True)
class _Cost:
    """What a message costs.

    Attributes:
        link_bytes: On the busiest link.
        rounds: Messages that follow each other.
        encode_ns: On each rank before it is sent.
        decode_ns: On each rank after it has come.
        processor_ns: As in `Exchange`; it contains encoding and decoding.
    """

    link_bytes: float
    rounds: int
    encode_ns: float = 0.0
    decode_ns: float = 0.0
    processor_ns: float | None = None


_Average = tuple[int, int]
"""The average of all gradients in a step: the step, and the number of the group of ranks."""


class Dispatched:
    """The dispatchers of a replay, one for each average of all gradients.

    Args:
        signals: Exchange -> average, and the gradient that is ready; `NULL` for the end of
            backward.
        numbers: Average -> exchange of each message.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: MessagePlan,
        signals: Mapping[int, tuple[_Average, int]],
        numbers: Mapping[_Average, Sequence[int]],
    ) -> None:
        self._signals, self._numbers = signals, numbers
        self._dispatchers: dict[_Average, Dispatcher] = {
            average: schedule.dispatcher(plan) for average in numbers
        }
        self._messages = {
            number: (average, plan.messages[place])
            for average, mine in numbers.items()
            for place, number in enumerate(mine)
        }
        self._started: set[int] = set()

    def signalled(self, exchange: int) -> Sequence[int]:
        """A gradient is ready on all ranks, or backward has ended on all."""
        average, gradient = self._signals[exchange]
        dispatcher = self._dispatchers[average]
        if gradient == NULL:
            return self._new(average, dispatcher.backward_ended())
        return self._new(average, dispatcher.gradient_ready(gradient))

    def completed(self, exchange: int) -> Sequence[int]:
        """A message has completed."""
        if exchange not in self._messages:
            return ()
        average, message = self._messages[exchange]
        return self._new(average, self._dispatchers[average].completed(message))

    def _new(self, average: _Average, messages: Sequence[Message]) -> list[int]:
        found = [self._numbers[average][message.number] for message in messages]
        new = [number for number in found if number not in self._started]
        self._started.update(new)
        return new


class _Exchanged:
    """Makes the program of a strategy."""

    def __init__(
        self,
        joined: JoinedSteps,
        program: Program,
        *,
        work: list[FloatArray],
        strategy: Strategy,
        gradients: list[Gradient],
        network: Network,
        ranks: int,
        calibration: Calibration | None,
        times_codecs: bool,
        quiet: float,
    ) -> None:
        self._times_codecs, self._quiet = times_codecs, quiet
        self._joined, self._program, self._work = joined, program, work
        self._network = network
        self._strategy, self._gradients = strategy, gradients
        self._ranks = ranks
        self._order = {gradient.index: place for place, gradient in enumerate(gradients)}
        # When each rank begins and ends each step, in the trace.
        self._bounds = [step_bounds(joined, rank, program.steps) for rank in program.ranks]
        schedule = strategy.schedule
        if schedule.timed_steps:
            rounds = messages_in_a_row("all_reduce", ranks)
            per_mib = bytes_on_link("all_reduce", ranks, 1 << 20) * network.ns_per_byte / 1e3
            schedule = schedule.with_values([rounds * network.overhead_ns / 1e3, per_mib])
        self._schedule = schedule
        # Of what averages parameters; None for what exchanges gradients.
        self._averages = strategy.frequency if strategy.exchanges == "parameters" else None
        if self._is_swapped and ranks != len(program.ranks):
            raise Refused("which ranks form pairs is simulated for those of the trace only")
        self._plan, self._fragments = self._planned()
        self._exchange = exchange_of(strategy.spec)
        is_measured = network.machines and not strategy.runs_on_reducer
        self._calibration = calibration if is_measured else None
        rule = strategy.optimizer_rule
        is_timed = strategy.encodes or rule is not None or strategy.exchanges == "momentum"
        is_timed = is_timed or strategy.place == "peers"
        is_timed = is_timed and _is_on_cpu(joined)
        self._crowded = _ranks_per_processor(joined) if is_timed else 1.0
        self._update_ns: float | None = None  # of the strategy's own rule
        if rule is not None:
            if not times_codecs:
                raise Refused("what its update costs is not calibrated")
            self._update_ns = self._crowded * rule_ns(rule, gradients)
        self._ops: list[str] = []  # of the messages of an update that sends them itself
        self._costs = self._message_costs()
        # DDP's own messages are no longer launched.
        self._exchanges = [
            replace(each, op=SIGNAL) if _carries_gradients(each) else each
            for each in program.exchanges
        ]
        self._queue = next(each.queue for each in program.exchanges if _carries_gradients(each))
        self._groups = [np.arange(len(program.ranks))]  # whose ranks average gradients
        self._in_flight = dict(program.in_flight)
        self._lowest_queue = min(NULL, *(each.queue for each in program.exchanges))
        self._signals: dict[int, tuple[_Average, int]] = {}
        self._signal_of: dict[tuple[_Average, int], int] = {}
        self._numbers: dict[_Average, list[int]] = {}
        # Step -> messages that average parameters: they start after it, they are awaited after it.
        self._launched: dict[int, list[int]] = {}
        self._due: dict[int, list[int]] = {}
        self._beside: set[int] = set()  # steps whose own work goes on beside messages
        self._cost_of: dict[int, _Cost] = {}  # of each message

    def edit(self) -> Edit:
        """The program with the strategy's messages, and its work."""
        for step in range(len(self._program.steps)):
            self._add_step(step)
        made = [self._items(place) for place in range(len(self._program.ranks))]
        edited = replace(
            self._program,
            items=made,
            exchanges=self._exchanges,
            in_flight=self._in_flight,
            controller=self._controller(made),
        )
        work = [items.work for items in made]
        cycle = self._strategy.cycle_steps
        return Edit(edited, work, cycle, self._more_us(), self._less_us(work))

    def _controller(self, items: list[Items]) -> Callable[[], Controller] | None:
        """What makes the controllers of replays of these items."""
        del items
        if not self._signals:
            return None
        return lambda: Dispatched(self._schedule, self._plan, self._signals, self._numbers)

    def _add_step(self, step: int) -> None:
        """Adds the messages that start in a step."""
        if self._averages is not None:
            self._average_after(step, self._averages)
        elif self._updates_after(step):
            self._beside.add(step)
            for number, ranks in enumerate(self._groups):
                if not self._ops:
                    self._add_signals((step, number), ranks)
                places = range(len(self._costs))
                self._numbers[step, number] = [self._add(each, ranks, step) for each in places]

    def _updates_after(self, step: int) -> bool:
        """Whether a step ends with an update: while gradients accumulate, it does not."""
        frequency = self._strategy.frequency
        once_a_step = frequency is None or self._averages is not None
        return once_a_step or (step + 1) % self._strategy.cycle_steps == 0

    def _add_signals(self, average: _Average, ranks: IntArray) -> None:
        for index in [*(gradient.index for gradient in self._gradients), NULL]:
            number = len(self._exchanges)
            self._signal_of[average, index] = number
            self._signals[number] = (average, index)
            self._exchanges.append(_exchange(SIGNAL, ranks, average[0]))

    def _planned(self) -> tuple[MessagePlan, list[range]]:
        """The messages, and those of each fragment of the model; none of what updates itself."""
        if self._strategy.exchanges == "momentum":
            return MessagePlan([], []), []
        try:
            if self._averages is not None:
                return self._plan_of_parameters(self._averages)
            plan = self._schedule.plan(self._gradients)
        except ValueError as error:
            raise Refused(str(error)) from error
        return plan, [range(len(plan.messages))]

    @property
    def _is_swapped(self) -> bool:
        """Whether pairs of ranks send to each other instead of an all_reduce."""
        return self._averages is not None and self._averages.swapped > 0

    def _plan_of_parameters(self, frequency: Frequency) -> tuple[MessagePlan, list[range]]:
        """The messages that average parameters, and those of each fragment of the model."""
        parameters = sorted(self._gradients, key=lambda each: each.index)
        parts = frequency.split([each.elements for each in parameters])
        plans = [plan_in_order([parameters[place] for place in part]) for part in parts]
        contents = [message.slices for plan in plans for message in plan.messages]
        ends = np.cumsum([len(plan.messages) for plan in plans]).tolist()
        fragments = [
            range(end - len(plan.messages), end) for plan, end in zip(plans, ends, strict=True)
        ]
        return MessagePlan(parameters, contents), fragments

    def _average_after(self, step: int, frequency: Frequency) -> None:
        """Adds the messages that average parameters and start after a step."""
        for average in frequency.averages_after(step, len(self._program.ranks)):
            ranks, due = np.array(average.ranks), step + average.delay
            numbers = [self._add(place, ranks, step) for place in self._fragments[average.fragment]]
            self._launched.setdefault(step, []).extend(numbers)
            self._due.setdefault(due, []).extend(numbers)
            if numbers:
                self._beside.update(range(step + 1, due + 1))

    def _add(self, place: int, ranks: IntArray, step: int) -> int:
        """Adds the exchange of a message of the plan; returns its number."""
        cost = self._costs[place]
        if self._ops:
            every = tuple(each.index for each in self._gradients)
            exchange = _exchange(self._ops[place], ranks, step, self._queue)
            return self._append(exchange, cost, every)
        carried = tuple(self._plan.messages[place].gradients)
        if self._is_swapped:
            return self._append(_exchange("send", ranks, step), cost, carried)
        return self._append(_exchange("all_reduce", ranks, step, self._queue), cost, carried)

    def _new_queue(self, in_flight: int) -> int:
        """Adds a queue of so many messages at a time."""
        self._lowest_queue -= 1
        self._in_flight[self._lowest_queue] = in_flight
        return self._lowest_queue

    def _append(self, exchange: Exchange, cost: _Cost, carried: tuple[int, ...]) -> int:
        """Adds an exchange with its cost and the gradients that it carries; returns its number."""
        number = len(self._exchanges)
        self._exchanges.append(
            replace(
                exchange,
                link_bytes=cost.link_bytes,
                rounds=cost.rounds,
                processor_ns=cost.processor_ns,
                encoded=self._strategy.encodes and cost.processor_ns is not None,
                tensors=len(carried),
                carried=carried,
            )
        )
        self._cost_of[number] = cost
        return number

    def _measured_ns(self, message: Message) -> float | None:
        """What a message takes of processors by the calibration."""
        if self._calibration is None:
            return None
        measured = self._calibration.exchange_ns(
            self._exchange,
            [each.elements for each in message.slices],
            messages=max(map(len, self._fragments)),
        )
        alone = _ONE_IN_FLIGHT if self._schedule.one_in_flight else 1.0
        return None if measured is None else alone * measured

    def _more_us(self) -> float:
        """What a step may take beyond the prediction: the engine's work, and slower codecs."""
        more = 0.0
        if self._update_ns is not None:
            own_ns = sum(cost.encode_ns + cost.decode_ns for cost in self._costs if self._ops)
            slower = (_SLOWER_HERE - 1) * (self._update_ns + own_ns) / 1e3
            more = slower + len(self._gradients) * _GRADIENT_US
        if self._strategy.runs_on_reducer or self._ops:
            return more
        return more + self._more_of_messages_us()

    def _more_of_messages_us(self) -> float:
        """The part of that for messages which PyTorch does not send."""
        measured = [cost.processor_ns for cost in self._costs if cost.processor_ns is not None]
        if self._calibration is not None and len(measured) == len(self._costs):
            return (_SLOWER_HERE - 1) * sum(measured) / 1e3 if self._strategy.encodes else 0.0
        gradients = 0 if self._averages is not None else len(self._gradients)
        codec_us = sum(cost.encode_ns + cost.decode_ns for cost in self._costs) / 1e3
        engine_us = len(self._costs) * _ENGINE_US + gradients * _GRADIENT_US
        return engine_us + (_SLOWER_CODEC - 1) * codec_us

    def _shares_of_steps(self) -> FloatArray:
        """The share of its recorded time that a rank's own work takes in each step."""
        steps = range(len(self._program.steps) + 1)
        return np.where([step in self._beside for step in steps], 1.0, self._quiet)

    def _less_us(self, work: list[FloatArray]) -> float:
        """What a step may take less where not every step exchanges: see `_ALONE`."""
        cycle, steps = self._strategy.cycle_steps, len(self._program.steps)
        if cycle == 1 or not self._network.machines:
            return 0.0
        each = sum(float(mine.sum()) for mine in work) / len(work) / steps / 1e3
        return _ALONE * each * (cycle - 1) / cycle

    def _message_costs(self) -> list[_Cost]:
        """What each message costs."""
        strategy = self._strategy
        if strategy.frequency is not None and strategy.exchanges == "momentum":
            return self._own_costs(strategy.frequency)
        return [self._cost(message) for message in self._plan.messages]

    def _cost(self, message: Message) -> _Cost:
        """What a message costs."""
        strategy = self._strategy
        codec = compose(strategy.codec, strategy.feedback) if strategy.encodes else None
        return self._plain(message) if codec is None else self._encoded(message, codec)

    def _encoded(self, message: Message, codec: CodecDescription) -> _Cost:
        """What a message costs that a codec shortens."""
        ranks, architecture = self._ranks, self._strategy.architecture
        sizes = [
            (part.elements, self._gradients[self._order[part.gradient]].element_bytes)
            for part in message.slices
        ]
        form = codec.exchange(message.elements, ranks)
        if architecture is not None:
            if form != "all_reduce":
                raise Refused("what its codec sends over an architecture is not simulated")
            wire = sum(codec.wire_bytes(elements, size) for elements, size in sizes)
            sent, rounds = self._over(architecture, message.elements, wire / message.elements)
        else:
            sent = sum(codec.sent_bytes(elements, ranks, size) for elements, size in sizes)
            rounds = messages_in_a_row(form, ranks)
        measured = self._measured_ns(message)
        if measured is not None:
            return _Cost(sent, rounds, processor_ns=measured)
        if not _is_on_cpu(self._joined):  # a cast: float32 in, 16 bits out, and back
            cast_ns = message.elements * (4 + 2) / _CAST_BYTES_PER_NS
            return _Cost(sent, rounds, cast_ns, cast_ns)
        if not self._times_codecs:
            raise Refused("what its codec takes is not calibrated")
        encode, decode = codec_ns_per_element(codec)
        if form == "all_to_all":  # each rank averages a part of all payloads, and encodes it
            rounds, encode, decode = 2 * rounds, encode * (1 + 1 / ranks), 2 * decode
        elements = message.elements * self._crowded
        return _Cost(sent, rounds, encode * elements, decode * elements)

    def _own_costs(self, frequency: Frequency) -> list[_Cost]:
        """What the messages cost that an update sends itself; its computing is that of codecs."""
        if not self._times_codecs:
            raise Refused("what its update costs is not calibrated")
        update, ranks = own_update(frequency, self._gradients, self._ranks), self._ranks
        self._update_ns = 0.0  # that of the job's optimizer goes
        self._ops = [each.op for each in update.sent]
        costs = [
            _Cost(
                bytes_on_link(each.op, ranks, each.bytes),
                messages_in_a_row(each.op, ranks),
                self._crowded * each.before_ns,
            )
            for each in update.sent
        ]
        costs[-1] = replace(costs[-1], decode_ns=self._crowded * update.after_ns)
        return costs

    def _plain(self, message: Message) -> _Cost:
        """What a message costs as it is."""
        ranks, architecture = self._ranks, self._strategy.architecture
        if self._averages is not None and self._averages.swapped:
            return _Cost(float(self._averages.swapped * message.bytes), 1)
        measured = self._measured_ns(message)
        if architecture is not None:
            size = message.bytes / max(message.elements, 1)
            return _Cost(*self._over(architecture, message.elements, size), processor_ns=measured)
        size = bytes_on_link("all_reduce", ranks, message.bytes)
        return _Cost(size, messages_in_a_row("all_reduce", ranks), processor_ns=measured)

    def _over(
        self, architecture: AnyArchitecture, elements: int, element_bytes: float
    ) -> tuple[float, int]:
        """Bytes on the busiest link, and messages in a row, of a sum over an architecture."""
        plan = self._rounds(architecture, elements, element_bytes)
        hosts: Sequence[int] = self._network.hosts
        if len(set(hosts)) == 1:  # its memory, which each rank uses
            hosts = range(self._ranks)
        return sum(_busiest(each, hosts, element_bytes) for each in plan), len(plan)

    def _rounds(
        self, architecture: AnyArchitecture, elements: int, element_bytes: float
    ) -> Sequence[Round]:
        """The rounds of a sum over an architecture."""
        ranks = range(self._ranks)
        if isinstance(architecture, Architecture):
            return architecture.plan(ranks, elements)
        if isinstance(architecture, Hierarchical):
            if architecture.ranks_per_host is not None:
                return architecture.plan(hosts_of(ranks, architecture.ranks_per_host), elements)
            hosts = self._network.hosts
            of_host = [[rank for rank in ranks if hosts[rank] == host] for host in sorted({*hosts})]
            return architecture.plan(of_host, elements)
        if isinstance(architecture, Auto):
            network = self._network
            if len(set(network.hosts)) < self._ranks:
                raise Refused("it measures links inside hosts, whose costs are not in the trace")
            alike = [
                [[each] * self._ranks for _ in ranks]
                for each in (network.overhead_ns / 1e3, network.ns_per_byte / 1e3)
            ]
            links = Links(*alike)
            return links.plan(links.choose(elements, round(element_bytes)).name, elements)
        raise Refused("its rounds are not known")

    def _items(self, place: int) -> Items:
        """The items of a rank, with gradients that become ready, and waits for the new messages."""
        items, work = self._program.items[place], self._work[place]
        gone = np.array([_carries_gradients(each) for each in self._program.exchanges] + [False])
        kept = ~gone[items.exchange]
        clock = _OwnTime(items, work)
        places = list(self._points(place))
        points = [
            (float(clock.at(time_)), order, kind, number)
            for order, (time_, kind, number) in enumerate(places)
        ]
        own = np.cumsum(work)
        at = np.concatenate([own[kept], [point[0] for point in points]])
        kind = np.concatenate([items.kind[kept], [point[2] for point in points]]).astype(np.int64)
        exchange = np.concatenate([items.exchange[kept], [point[3] for point in points]])
        delay = self._delays(items, ~kept & (items.kind == LAUNCH), clock)
        added = [
            delay(own) + self._held_ns(number, ready) if kind_ == LAUNCH else 0.0
            for (own, _, kind_, number), (ready, _, _) in zip(points, places, strict=True)
        ]
        extra = np.concatenate([items.extra[kept], added])
        # At one instant: what the rank does itself, signals, waits, then the end of the step.
        order = np.lexsort((np.arange(len(at)), kind == STEP_END, at))
        at, kind, exchange, extra = (
            at[order],
            kind[order],
            exchange[order].astype(int),
            extra[order],
        )
        begin, until = clock.instants(at)
        ends = np.cumsum(kind == STEP_END)
        step = np.append(0, ends[:-1])
        shares = self._shares_of_steps()
        between = np.diff(np.append(0.0, at)) * shares[step]
        between += self._codec_work(kind, exchange)
        if self._schedule.wait == "next_update":  # one half before its messages start
            more = _DELAYED_UPDATE / 2 * self._updates_ns(place)
            ended = [number for (_, index), number in self._signal_of.items() if index == NULL]
            between[(kind == LAUNCH) & np.isin(exchange, ended)] += more
            between[kind == STEP_END] += more
        if self._update_ns is not None:
            updates = self._updates_ns(place) * shares[:-1]
            changed = [self._updates_after(step) for step in range(len(updates))]
            more = np.where(changed, self._update_ns - updates, 0.0)
            between[kind == STEP_END] = np.maximum(between[kind == STEP_END] + more, 0.0)
        return Items(kind, exchange, between, extra, begin, until, step)

    def _updates_ns(self, place: int) -> FloatArray:
        """How long a rank's optimizer takes in each step."""
        update = self._joined.work[self._program.ranks[place]]["update"]
        return lengths_within(update, *self._bounds[place]).astype(float)

    def _update_begins(self, place: int) -> list[int]:
        """When a rank's update begins in each step, in the trace."""
        rank = self._program.ranks[place]
        time_, update = self._joined.scans[rank].gradient_time, self._joined.work[rank]["update"]
        starts, ends = self._bounds[place]
        found = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            inside = time_[(time_ >= start) & (time_ < end)]
            found.append(_begin(update.start, int(inside.max(initial=start)), end))
        return found

    def _delays(
        self, items: Items, launches: IntArray, clock: _OwnTime
    ) -> Callable[[float], float]:
        """How long a message that becomes ready at a time takes to its queue.

        As the recorded launch that comes next does: where ranks share processors, the library's
        threads wait for one as long as the ranks compute.

        Args:
            items: The rank's items.
            launches: Which of them launch gradients.
            clock: The rank's own time.
        """
        rows = np.flatnonzero(launches)
        if not len(rows):
            return lambda _: 0.0
        own = np.array([clock.at(int(until)) for until in items.until[rows]])
        extra = items.extra[rows]
        return lambda at: float(extra[min(int(np.searchsorted(own, at)), len(rows) - 1)])

    def _codec_work(self, kind: IntArray, exchange: IntArray) -> FloatArray:
        """What encoding before a message's last gradient, and decoding after its wait, take."""
        added = np.zeros(len(kind))
        if not any(cost.encode_ns or cost.decode_ns for cost in self._cost_of.values()):
            return added
        carriers: dict[int, list[int]] = {}
        for place, message in enumerate(self._plan.messages):
            last = max(message.gradients, key=self._order.__getitem__)
            carriers.setdefault(last, []).append(place)
        for row, number in enumerate(exchange.tolist()):
            if kind[row] == LAUNCH and number in self._signals:
                average, gradient = self._signals[number]
                for place in carriers.get(gradient, ()):
                    added[row] += self._cost_of[self._numbers[average][place]].encode_ns
            elif kind[row] == LAUNCH and number in self._cost_of:
                added[row] += self._cost_of[number].encode_ns
            elif kind[row] == WAIT and number in self._cost_of and row + 1 < len(kind):
                added[row + 1] += self._cost_of[number].decode_ns
        return added

    def _points(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Time, kind and exchange of what a rank does for the strategy."""
        group = next(number for number, ranks in enumerate(self._groups) if place in ranks)
        starts, ends = self._bounds[place]
        begins = self._update_begins(place) if self._ops else []
        for step in range(len(starts)):
            for number in self._numbers[step, group] if self._ops else ():
                yield from ((begins[step], kind, number) for kind in (LAUNCH, WAIT))
            if ((step, group), NULL) in self._signal_of:
                ready = self._ready_times(place, step)
                for index, at in ready.items():
                    yield at, LAUNCH, self._signal_of[(step, group), index]
                last, ended = max(ready.values()), int(ends[step]) - 1
                if self._schedule.wait != "next_update":  # it starts its messages after the update
                    ended = min(last + 1, ended)
                yield ended, LAUNCH, self._signal_of[(step, group), NULL]
                yield from self._waits(place, (step, group), last)
            for kind, numbers in ((LAUNCH, self._launched), (WAIT, self._due)):  # after the update
                for number in numbers.get(step, ()):
                    if place in self._exchanges[number].places:
                        yield int(ends[step]) - 1, kind, number

    def _held_ns(self, number: int, ready: int) -> float:
        """How long a rank holds a message back that is ready at a time of the trace."""
        del number, ready
        return 0.0

    def _ready_times(self, place: int, step: int) -> dict[int, int]:
        """When each gradient of a step is ready on a rank, in the trace.

        With the last one at the latest, which is also when those are whose time is not known.
        """
        scan, end = self._joined.scans[self._program.ranks[place]], self._bounds[place][1][step]
        rows = scan.gradient_step == self._program.steps[step]
        known = dict(zip(scan.gradient_tensor[rows], scan.gradient_time[rows], strict=True))
        last = int(max(known.values(), default=end - 1))
        return {
            each.index: min(int(known.get(each.index, last)), int(end) - 1)
            for each in self._gradients
        }

    def _waits(self, place: int, average: _Average, last: int) -> Iterator[tuple[int, int, int]]:
        """Where a rank waits for the messages of an average.

        Args:
            last: When its last gradient is ready.
        """
        messages, (step, _) = self._numbers[average], average
        update = self._joined.work[self._program.ranks[place]]["update"].start
        starts, ends = self._bounds[place]
        if self._schedule.wait == "update":
            begin = _begin(update, last, int(ends[step]))
            yield from ((begin, WAIT, number) for number in messages)
            return
        if step + 1 >= len(starts):
            return
        if self._schedule.wait == "next_update":
            after = np.searchsorted(update, starts[step + 1])
            begin = int(update[after]) if after < len(update) else int(ends[step + 1])
            yield from ((min(begin, int(ends[step + 1]) - 1), WAIT, number) for number in messages)
            return
        used = self._uses(place, step + 1, int(starts[step + 1]), int(ends[step + 1]))
        for message, number in zip(self._plan.messages, messages, strict=True):
            yield min(used[each] for each in message.gradients), WAIT, number

    def _uses(self, place: int, step: int, start: int, end: int) -> dict[int, int]:
        """When the forward pass of a step first uses each parameter.

        From the layers that the trace shows; where it shows none, uses are taken to be spread
        evenly from the start of the step to the first gradient, in the reverse order of gradients.
        """
        program, joined = self._program, self._joined
        rank = program.ranks[place]
        scan = joined.scans[rank]
        rows = scan.gradient_step == program.steps[step]
        first = int(scan.gradient_time[rows].min()) if rows.any() else end
        line = scan.timeline
        begins: dict[str, int] = {}
        if line is not None:
            times, _, names = line.segments
            low, high = np.searchsorted(times, [start, first])
            for row in range(int(low), int(high)):
                if names[row] != NULL:
                    begins.setdefault(line.names[names[row]], int(times[row]))
        count = len(self._gradients)
        found = {}
        for at, gradient in enumerate(reversed(self._gradients)):
            evenly = start + (first - start) * at // max(count, 1)
            layer = gradient.name.rpartition(".")[0]
            found[gradient.index] = begins.get(layer, evenly)
        return found


@dataclass(frozen=True)
class _FusedMessage:
    """Gradients that leave together.

    Attributes:
        message: What it carries.
        at: When rank 0 decides that, ns in the trace.
        cost: What it costs.
    """

    message: Message
    at: int
    cost: _Cost


class _Fused(_Exchanged):
    """Makes the program of a schedule that sends by the clock, on which rank 0 decides.

    The clock starts with the first gradient of a step. At each tick, the dispatcher gets the
    gradients that were ready on rank 0 by then in the trace.
    """

    def _message_costs(self) -> list[_Cost]:
        """What the messages of the step with the most messages cost."""
        steps = filter(self._updates_after, range(len(self._program.steps)))
        ticks = {step: list(self._ticks(step)) for step in steps}
        self._fragments = [range(max(map(len, ticks.values()), default=0))]
        self._fused = {
            step: [_FusedMessage(message, at, self._cost(message)) for message, at in sent]
            for step, sent in ticks.items()
        }
        self._message_of: dict[int, _FusedMessage] = {}
        most = max(self._fused.values(), key=len, default=[])
        return [fused.cost for fused in most]

    def _ticks(self, step: int) -> Iterator[tuple[Message, int]]:
        """The messages of a step, and at which tick they are sent."""
        cycle_ns = max(round((self._schedule.cycle_ms or 0.0) * 1e6), 1)
        dispatcher, ready = self._schedule.dispatcher(self._plan), self._ready_times(0, step)
        left = deque(sorted(ready, key=ready.__getitem__))
        tick = ready[left[0]]
        while left:
            tick += cycle_ns * max(-(-(ready[left[0]] - tick) // cycle_ns), 1)
            while left and ready[left[0]] <= tick:
                dispatcher.gradient_ready(left.popleft())
            if not left:
                dispatcher.backward_ended()
            yield from ((message, tick) for message in dispatcher.tick())

    def _add_step(self, step: int) -> None:
        if not self._updates_after(step):
            return
        self._beside.add(step)
        numbers = []
        for fused in self._fused[step]:
            carried = tuple(fused.message.gradients)
            exchange = _exchange("all_reduce", self._groups[0], step, self._queue)
            number = self._append(exchange, fused.cost, carried)
            self._message_of[number] = fused
            numbers.append(number)
        self._numbers[step, 0] = numbers

    def _points(self, place: int) -> Iterator[tuple[int, int, int]]:
        for average, numbers in self._numbers.items():
            ready = self._ready_times(place, average[0])
            for number in numbers:
                yield max(map(ready.__getitem__, self._exchanges[number].carried)), LAUNCH, number
            yield from self._waits(place, average, max(ready.values()))

    def _held_ns(self, number: int, ready: int) -> float:
        """Until the tick, and until rank 0's decision has come."""
        if number not in self._message_of:
            return 0.0
        told = messages_in_a_row("broadcast", self._ranks)
        return max(self._message_of[number].at - ready, 0) + self._network.alone_ns(told, 0.0)


class _Grouped(_Exchanged):
    """Makes the program of a rule by which groups average gradients in each step.

    All ranks average their parameters after some steps."""

    def _message_costs(self) -> list[_Cost]:
        """What the messages of a largest group cost."""
        rule, everyone = self._strategy.synchronization, self._ranks
        assert isinstance(rule, Grouped)
        if everyone != len(self._program.ranks):
            raise Refused("which ranks form groups is simulated for those of the trace only")
        self._rule, groups = rule, rule.groups(everyone)
        of_rank = self._network.hosts
        hosts = [{of_rank[rank] for rank in group} for group in groups if len(group) > 1]
        if len(set(of_rank)) > 1 and any(len(each) == 1 for each in hosts):
            raise Refused("what messages inside a host cost is not in the trace")
        self._costs_of: dict[int, list[_Cost]] = {}
        sizes = sorted({len(group) for group in groups})
        for size in sizes:
            self._ranks = size  # for which costs are found
            self._costs_of[size] = super()._message_costs()
        self._ranks = everyone
        parameters = plan_in_order(sorted(self._gradients, key=lambda each: each.index))
        self._parameters = [(each, self._plain(each)) for each in parameters.messages]
        return self._costs_of[sizes[-1]]

    def edit(self) -> Edit:
        """The program with the messages of groups and of all ranks."""
        self._everyone = self._groups[0]
        self._groups = [np.array(group) for group in self._rule.groups(self._ranks)]
        in_flight = self._in_flight.get(self._queue, 1)
        self._queues = [self._new_queue(in_flight) for _ in self._groups]
        return super().edit()

    def _add_step(self, step: int) -> None:
        self._beside.add(step)
        for group, ranks in enumerate(self._groups):
            if len(ranks) > 1:
                self._add_signals((step, group), ranks)
                costs = zip(self._plan.messages, self._costs_of[len(ranks)], strict=True)
                exchange = _exchange("all_reduce", ranks, step, self._queues[group])
                self._numbers[step, group] = [
                    self._append(exchange, cost, tuple(message.gradients))
                    for message, cost in costs
                ]
        if self._rule.averages_after(step):
            exchange = _exchange("all_reduce", self._everyone, step, self._queue)
            self._launched[step] = self._due[step] = [
                self._append(exchange, cost, tuple(message.gradients))
                for message, cost in self._parameters
            ]


@dataclass(frozen=True)
class _Visit:
    """What a worker exchanges with a server in a step: numbers of exchanges.

    Attributes:
        push: Its gradients.
        update: The server's work: it applies them.
        reply: The parameters for its next step.
    """

    push: int
    update: int
    reply: int


class Served:
    """The servers of a replay: each follows the strategy's rule, by the engine's own state machine.

    Args:
        rule: The rule.
        visits: Worker -> step -> its visit of each server.
        seconds: Own work of each worker in each step, shape (workers, steps).
    """

    def __init__(
        self,
        rule: ServerRule,
        visits: Sequence[Sequence[Sequence[_Visit]]],
        seconds: FloatArray,
    ) -> None:
        self._visits, self._seconds = visits, seconds
        workers, servers = len(visits), len(visits[0][0])
        self._states = [ServerState(rule, workers) for _ in range(servers)]
        self._of = {
            number: (worker, step, server)
            for worker, of_worker in enumerate(visits)
            for step, of_step in enumerate(of_worker)
            for server, visit in enumerate(of_step)
            for number in (visit.push, visit.update, visit.reply)
        }
        self._step = [0] * workers  # the step whose replies a worker waits for
        self._clock = [0] * workers
        self._told: list[dict[int, int]] = [{} for _ in range(workers)]

    def signalled(self, exchange: int) -> Sequence[int]:
        """There are no signals."""
        raise AssertionError(exchange)

    def completed(self, exchange: int) -> Sequence[int]:
        """A push has come, a server has applied it, or a worker has its parameters."""
        if exchange not in self._of:
            return ()
        worker, step, server = self._of[exchange]
        visit = self._visits[worker][step][server]
        if exchange == visit.push:
            return (visit.update,)
        state = self._states[server]
        if exchange == visit.update:
            clock = self._clock[worker]
            pushed = state.push(worker, clock, float(self._seconds[worker, step]))
            return self._replies(server, [*pushed, *state.read(worker, clock + 1)])
        if len(self._told[worker]) < len(self._states):
            return ()
        self._clock[worker] = min(self._told[worker].values())
        self._told[worker] = {}
        self._step[worker] += 1
        if self._step[worker] < len(self._visits[worker]):
            return ()
        left = [(number, each.leave(worker)) for number, each in enumerate(self._states)]
        return [reply for number, found in left for reply in self._replies(number, found)]

    def _replies(self, server: int, decisions: Sequence[Decision]) -> list[int]:
        found = []
        for decision in decisions:
            if isinstance(decision, Answer):
                worker = decision.worker
                self._told[worker][server] = decision.clock
                found.append(self._visits[worker][self._step[worker]][server].reply)
        return found


@dataclass(frozen=True)
class _Server:
    """A server, and what one visit of a worker costs.

    Attributes:
        home: The rank that starts it, on whose host it is.
        queue: Of its work: one push after another.
        push: The gradients that a worker sends; the server decodes them.
        reply_bytes: The parameters that it gets.
        share: Of the elements, that the server has.
    """

    home: int
    queue: int
    push: _Cost
    reply_bytes: float
    share: float


class _ByRule(_Exchanged):
    """Makes the program of a rule by which a rank exchanges parameters with some processes."""

    def _planned(self) -> tuple[MessagePlan, list[range]]:
        if self._ranks != len(self._program.ranks):
            raise Refused("which processes exchange what is simulated for the trace's ranks only")
        self._random = np.random.default_rng(0)
        return MessagePlan([], []), []

    def _message_costs(self) -> list[_Cost]:
        return []

    def _more_us(self) -> float:
        """What a step may take longer: computing that is slower in a job, and the engine's work."""
        own_ns = sum(cost.encode_ns + cost.decode_ns for cost in self._costs)
        return (_SLOWER_HERE - 1) * own_ns / 1e3 + len(self._gradients) * _GRADIENT_US

    def _sent_by(self, place: int) -> Exchange:
        """What a message of a rank has whatever it carries: from one process to another."""
        network = self._network
        on_machine = network.machines.count(network.machines[place])
        return replace(
            _exchange("send", np.array([place]), 0),
            rounds=1,
            processor_ns=network.overhead_ns / on_machine,  # of a round, in which all ranks send
            tensors=len(self._gradients),
            carried=tuple(gradient.index for gradient in self._gradients),
        )

    def _visit(self, message: Exchange, server: _Server, update_ns: float) -> _Visit:
        """Adds a push, the server's work and a reply.

        Args:
            message: What a message of the worker has whatever it carries.
            update_ns: What an update of all parameters takes.
        """
        (worker,), first = message.places.tolist(), len(self._exchanges)
        push = replace(
            message,
            weight=self._uneven(),
            bytes=round(server.push.link_bytes),
            link_bytes=server.push.link_bytes,
            ends=(worker, server.home),
        )
        reply = replace(
            message,
            op="recv",
            weight=self._uneven(),
            bytes=round(server.reply_bytes),
            link_bytes=server.reply_bytes,
            ends=(server.home, worker),
        )
        beside = replace(
            message,
            op=BESIDE,
            queue=server.queue,
            link_bytes=0.0,
            processor_ns=server.share * update_ns + server.push.decode_ns,
            tensors=0,
            ends=(server.home, server.home),
        )
        self._exchanges += [push, beside, reply]
        self._cost_of[first] = server.push
        return _Visit(first, first + 1, first + 2)

    @property
    def _size(self) -> float:
        """Bytes of all parameters."""
        return float(sum(gradient.bytes for gradient in self._gradients))

    def _mean_ns(self, others: int) -> tuple[float, float]:
        """What a rank takes to copy its parameters, and for the mean with those of others, ns."""
        if not self._times_codecs:
            raise Refused("what its mean costs is not calibrated")
        before, after = mean_ns(self._gradients, others)
        return self._crowded * before, self._crowded * after

    def _uneven(self) -> float:
        """A share of a link, see `_UNEVEN`."""
        return float(self._random.uniform(*_UNEVEN))


class _Served(_ByRule):
    """Makes the program of a rule by which workers push to servers and read from them."""

    def edit(self) -> Edit:
        """The program with pushes, the servers' work and replies, and its work."""
        servers = self._servers()
        self._update_ns = 0.0  # the job's own optimizer updates nothing
        self._visits = [self._visits_of(each, servers) for each in range(self._ranks)]
        return super().edit()

    def _add_step(self, step: int) -> None:
        self._beside.add(step)

    def _controller(self, items: list[Items]) -> Callable[[], Controller]:
        rule, steps = self._strategy.synchronization, len(self._program.steps)
        assert isinstance(rule, ServerRule)
        seconds = np.array([np.bincount(each.step, each.work, steps) / 1e9 for each in items])
        return lambda: Served(rule, self._visits, seconds)

    def _servers(self) -> list[_Server]:
        """The servers, each with its parts of the parameters."""
        strategy = self._strategy
        assert isinstance(strategy.architecture, ParameterServer)
        codec = compose(strategy.codec, strategy.feedback) if strategy.encodes else None
        if codec is not None and not self._times_codecs:
            raise Refused("what its codec takes is not calibrated")
        encode, decode = (0.0, 0.0) if codec is None else codec_ns_per_element(codec)
        size = {gradient.index: gradient.element_bytes for gradient in self._gradients}
        elements = {gradient.index: gradient.elements for gradient in self._gradients}
        placed = placement.place(elements, strategy.architecture.dedicated())
        servers = []
        for number, load in enumerate(placed.loads):
            parts = [(k.stop - k.start, size[k.tensor]) for k in placed.keys if k.server == number]
            values = float(sum(count * width for count, width in parts))
            sent = values
            if codec is not None:
                sent = float(sum(codec.wire_bytes(count, width) for count, width in parts))
            coded = load * self._crowded
            servers.append(
                _Server(
                    home=number % len(self._program.ranks),
                    queue=self._new_queue(1),
                    push=_Cost(sent, 1, encode * coded, decode * coded),
                    reply_bytes=values,
                    share=load / max(sum(placed.loads), 1),
                )
            )
        return servers

    def _visits_of(self, worker: int, servers: Sequence[_Server]) -> list[list[_Visit]]:
        """Adds what a worker exchanges with the servers in each step."""
        update_ns = float(np.median(self._updates_ns(worker)))
        message = self._sent_by(worker)
        return [
            [self._visit(replace(message, step=step), server, update_ns) for server in servers]
            for step in range(len(self._program.steps))
        ]

    def _points(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Where a rank pushes, and waits for the parameters."""
        for step, begin in enumerate(self._update_begins(place)):
            yield from ((begin, LAUNCH, visit.push) for visit in self._visits[place][step])
            yield from ((begin, WAIT, visit.reply) for visit in self._visits[place][step])


class _Neighbours(_ByRule):
    """Makes the program of ranks that average parameters with their neighbours in each step."""

    def _message_costs(self) -> list[_Cost]:
        """What each message costs, with its part of what a rank does for all of them."""
        rule = self._strategy.synchronization
        assert isinstance(rule, Gossip)
        self._peers = [rule.neighbours(rank, self._ranks) for rank in range(self._ranks)]
        others = max(map(len, self._peers))
        before, after = self._mean_ns(others)
        return [_Cost(self._size, 1, before / (2 * others), after / (2 * others))]

    def _add_step(self, step: int) -> None:
        self._beside.add(step)
        (cost,) = self._costs
        for place, peers in enumerate(self._peers):
            message = self._sent_by(place)
            cost = replace(cost, processor_ns=message.processor_ns)
            for peer in peers:
                both = np.array(sorted((place, peer)))
                message = replace(message, places=both, step=step, ends=(place, peer))
                number = self._append(message, cost, message.carried)
                self._launched.setdefault(step, []).append(number)

    def _points(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Where a rank sends and receives after an update, and waits before the next one."""
        begins, (_, ends) = self._update_begins(place), self._bounds[place]
        for step, numbers in self._launched.items():
            for number in numbers:
                if place in self._exchanges[number].places:
                    yield int(ends[step]) - 1, LAUNCH, number
                    if step + 1 < len(ends):
                        yield begins[step + 1], WAIT, number


class Answered:
    """Passive ranks that answer requests at once: the end of an exchange starts the next one."""

    def __init__(self, following: Mapping[int, int]) -> None:
        self._following = following

    def signalled(self, exchange: int) -> Sequence[int]:
        """There are no signals."""
        raise AssertionError(exchange)

    def completed(self, exchange: int) -> Sequence[int]:
        """A message has come, or its answer is computed."""
        return (self._following[exchange],) if exchange in self._following else ()


class _Pairs(_ByRule):
    """Makes the program of active ranks that average with a passive one, which answers beside."""

    def _message_costs(self) -> list[_Cost]:
        rule = self._strategy.synchronization
        assert isinstance(rule, AdPsgd)
        self._rule = rule
        before, self._after_ns = self._mean_ns(1)
        return [_Cost(self._size, 1, before)]

    def edit(self) -> Edit:
        """The program with requests and answers."""
        (push,), ranks = self._costs, range(self._ranks)
        self._passive = {
            place: _Server(place, self._new_queue(1), push, self._size, 1.0)
            for place in ranks
            if not self._rule.is_active(place)
        }
        self._visits: dict[tuple[int, int], _Visit] = {}
        return super().edit()

    def _add_step(self, step: int) -> None:
        self._beside.add(step)
        clock = int(self._program.steps[step])
        for place in filter(self._rule.is_active, range(self._ranks)):
            peer = self._passive[self._rule.partner(place, self._ranks, clock)]
            message = replace(self._sent_by(place), step=step)
            self._visits[place, step] = self._visit(message, peer, self._after_ns)

    def _controller(self, items: list[Items]) -> Callable[[], Controller]:
        del items
        following = {visit.push: visit.update for visit in self._visits.values()}
        following |= {visit.update: visit.reply for visit in self._visits.values()}
        return lambda: Answered(following)

    def _points(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Where an active rank asks a passive one, and waits for its answer."""
        for step, begin in enumerate(self._update_begins(place)):
            if visit := self._visits.get((place, step)):
                yield begin, LAUNCH, visit.push
                yield begin, WAIT, visit.reply


def _begin(updates: IntArray, backward: int, end: int) -> int:
    """When the update of a step begins: the first one after the end of its backward pass."""
    after = np.searchsorted(updates, backward)
    begin = int(updates[after]) if after < len(updates) else end
    return max(min(begin, end - 1), backward + 1)


class _OwnTime:
    """Maps instants of the trace to a rank's own work until then."""

    def __init__(self, items: Items, work: FloatArray) -> None:
        done = np.cumsum(work)
        self._time = np.stack([items.begin, items.until], axis=1).ravel()
        self._work = np.stack([done - work, done], axis=1).ravel()

    def at(self, instant: int) -> float:
        """Own work before an instant, ns."""
        return float(np.interp(instant, self._time, self._work))

    def instants(self, work: FloatArray) -> tuple[IntArray, IntArray]:
        """Begins and ends of pieces of own work, which follow each other, in the trace.

        Args:
            work: Own work before the end of each piece, ascending, ns.
        """
        done, time = self._work, self._time
        before = np.append(0.0, work[:-1])
        # Where the rank waited, own work stands still: a piece ends before, and begins after it.
        ends = np.interp(work, *_first_of_each(done, time))
        begins = np.interp(before, *_first_of_each(done[::-1], time[::-1]))
        return np.minimum(begins, ends).astype(np.int64), ends.astype(np.int64)


def _first_of_each(keys: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The first value of each key, by ascending keys."""
    distinct, place = np.unique(keys, return_index=True)
    return distinct, values[place]


def _exchange(op: str, ranks: IntArray, step: int, queue: int = NULL) -> Exchange:
    return Exchange(
        op=op,
        group="",
        queue=queue,
        places=ranks,
        bytes=0,
        transfer=np.zeros(len(ranks)),
        needs=None,
        tensors=0,
        step=step,
    )


def _busiest(transfers: Round, hosts: Sequence[int], element_bytes: float) -> float:
    """Bytes that the busiest host sends to others, or receives from them, in a round."""
    loads: Counter[tuple[str, int]] = Counter()
    for each in transfers:
        source, target = hosts[each.source], hosts[each.target]
        for end in (("out", source), ("in", target)) if source != target else ():
            loads[end] += each.elements
    return max(loads.values(), default=0) * element_bytes


def _ranks_per_processor(joined: JoinedSteps) -> float:
    """How many ranks share a processor while all of them encode; 1 if that is not known."""
    trace = joined.trace
    uses = host_uses(trace, joined.steady)
    machines = Counter(trace.infos(rank)[-1].clock_domain.partition(" ")[0] for rank in trace.ranks)
    if not uses:
        return 1.0
    return max(max(machines.values()) / max(use.processors for use in uses), 1.0)
