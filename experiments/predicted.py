"""Strategies in ``ddltrace whatif``: takes DDP's messages out of a program and sends a strategy's.

The schedule's own plan and dispatcher decide, the objects that the engine runs; what a message
carries comes from the codec's own sizes, and which ranks exchange it from the architecture's own
rounds. The dispatcher of one rank stands for all: all ranks start their messages in the same order,
and a message proceeds when its last rank has come. Servers that update the parameters answer by the
state machine that they run in a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    Exchange,
    Items,
    Program,
    step_bounds,
)
from ddltrace.analyzer.whatif.questions import Edit, Refused
from ddltrace.experiments.architectures import placement
from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.transfers import Round
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.frequency.frequency import Frequency
from ddltrace.experiments.messages.message_plan import (
    Gradient,
    Message,
    MessagePlan,
    plan_in_order,
)
from ddltrace.experiments.schedules.base import Dispatcher, Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.spec import BASELINE, exchange_of, parse
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.bsp import Bsp
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.synchronization.server_state import Answer, Decision, ServerState
from ddltrace.experiments.timed_here import codec_ns_per_element, own_update, rule_ns

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
) -> Edit:
    """Replaces the gradient messages of a program by those of a strategy.

    Args:
        work: Own work before each item of each rank.
        spec: The strategy.
        network: What messages cost.
        ranks: How many ranks exchange the messages: the program is resized afterwards.
        calibration: What the engine's messages take of processors, where it is measured.
        times_codecs: Whether to time a codec here that is not calibrated.
        quiet: The share of its time that a rank's own work takes where no messages use processors.

    Raises:
        Refused: The trace does not hold what the strategy would do to the job.
        UsageError: It is not a strategy.
    """
    strategy = parse(spec)
    _check(joined, strategy)
    gradients = _gradients(joined, program)
    if network is None:
        raise Refused("the trace holds no sizes of messages: what messages cost is not known")
    kind = _Served if _is_served(strategy) else _Exchanged
    return kind(
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
    rule = strategy.synchronization
    if strategy.parallelism is not None:
        raise Refused("how the model would be divided is not in the trace")
    if rule is not None and not isinstance(rule, Bsp) and not _is_served(strategy):
        raise Refused("when its workers would go on is not simulated: experiment run measures it")
    if strategy.transport is not None:
        raise Refused("what another library costs is not in the trace")
    if strategy.architecture is not None and not isinstance(strategy.architecture, Architecture):
        raise Refused("compositions of architectures are not simulated")
    if isinstance(strategy.schedule, Poseidon):
        raise Refused("which layers send factors depends on the batch, which is not in the trace")
    if strategy.schedule.search() is not None:
        raise Refused("it searches while the job runs: ask with --search, or for one setting")
    if strategy.schedule.cycle_ms is not None:
        raise Refused("it sends by the clock, which is not simulated: experiment run measures it")
    device = joined.trace.infos(joined.trace.ranks[0])[-1].device
    if strategy.encodes and device != "cpu":
        raise Refused("what encoding costs on this device is not known")
    own = strategy.optimizer_rule is not None or strategy.exchanges == "momentum"
    if (own or _is_served(strategy)) and device != "cpu":
        raise Refused("what its update costs on this device is not known")


def _is_served(strategy: Strategy) -> bool:
    """Whether servers of their own update the parameters by what each worker pushes."""
    return strategy.place == "servers"


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


class Dispatched:
    """The dispatchers of a replay, one for each step that exchanges.

    Args:
        signals: Exchange -> step, and the gradient that is ready; `NULL` for the end of backward.
        numbers: Step -> exchange of each message.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: MessagePlan,
        signals: dict[int, tuple[int, int]],
        numbers: dict[int, list[int]],
    ) -> None:
        self._signals, self._numbers = signals, numbers
        self._dispatchers: dict[int, Dispatcher] = {
            step: schedule.dispatcher(plan) for step in numbers
        }
        self._messages = {
            number: (step, plan.messages[place])
            for step, mine in numbers.items()
            for place, number in enumerate(mine)
        }
        self._started: set[int] = set()

    def signalled(self, exchange: int) -> Sequence[int]:
        """A gradient is ready on all ranks, or backward has ended on all."""
        step, gradient = self._signals[exchange]
        dispatcher = self._dispatchers[step]
        if gradient == NULL:
            return self._new(step, dispatcher.backward_ended())
        return self._new(step, dispatcher.gradient_ready(gradient))

    def completed(self, exchange: int) -> Sequence[int]:
        """A message has completed."""
        if exchange not in self._messages:
            return ()
        step, message = self._messages[exchange]
        return self._new(step, self._dispatchers[step].completed(message))

    def _new(self, step: int, messages: Sequence[Message]) -> list[int]:
        found = [self._numbers[step][message.number] for message in messages]
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
        self._calibration = calibration if network.machines and not self._is_ddp else None
        rule = strategy.optimizer_rule
        is_timed = strategy.encodes or rule is not None or strategy.exchanges == "momentum"
        self._crowded = _ranks_per_processor(joined) if is_timed else 1.0
        self._update_ns: float | None = None  # of the strategy's own rule
        if rule is not None:
            if not times_codecs:
                raise Refused("what its update costs is not calibrated")
            engine_us = len(gradients) * (calibration.gradient_us if calibration else 0.0)
            self._update_ns = self._crowded * rule_ns(rule, gradients) + engine_us * 1e3
        self._ops: list[str] = []  # of the messages of an update that sends them itself
        self._costs = self._message_costs()
        # DDP's own messages are no longer launched.
        self._exchanges = [
            replace(each, op=SIGNAL) if _carries_gradients(each) else each
            for each in program.exchanges
        ]
        self._queue = next(each.queue for each in program.exchanges if _carries_gradients(each))
        self._signals: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, list[int]] = {}
        self._due: dict[int, list[int]] = {}  # step -> messages that average parameters
        self._beside: set[int] = set()  # steps whose own work goes on beside messages
        self._cost_of: dict[int, _Cost] = {}  # of each message
        self._ready: list[int] = []

    def edit(self) -> Edit:
        """The program with the strategy's messages, and its work."""
        program, ranks = self._program, np.arange(len(self._program.ranks))
        cycle = self._strategy.cycle_steps
        signal_of: dict[tuple[int, int], int] = {}
        for step in range(len(program.steps)):
            if self._averages is not None:
                self._average_after(step, self._averages)
                continue
            if (step + 1) % cycle:
                continue
            self._beside.add(step)
            messages = range(len(self._costs))
            if self._ops:
                self._numbers[step] = [self._add(place, ranks, step) for place in messages]
                continue
            for index in [*(gradient.index for gradient in self._gradients), NULL]:
                signal_of[step, index] = len(self._exchanges)
                self._signals[len(self._exchanges)] = (step, index)
                self._exchanges.append(_exchange(SIGNAL, ranks, step))
            self._numbers[step] = [self._add(place, ranks, step) for place in messages]
        self._ready = [number for (_, index), number in signal_of.items() if index != NULL]
        made = [self._items(place, signal_of) for place in range(len(program.ranks))]
        edited = replace(
            program,
            items=made,
            exchanges=self._exchanges,
            controller=None if self._averages is not None or self._ops else self._dispatched,
        )
        work = [items.work for items in made]
        return Edit(edited, work, cycle, self._more_us(), self._less_us(work))

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
            self._numbers.setdefault(step, []).extend(numbers)
            self._due.setdefault(due, []).extend(numbers)
            if numbers:
                self._beside.update(range(step + 1, due + 1))

    def _add(self, place: int, ranks: IntArray, step: int) -> int:
        """Adds the exchange of a message of the plan; returns its number."""
        number, cost, together = len(self._exchanges), self._costs[place], not self._is_swapped
        if self._ops:
            op, carried = self._ops[place], tuple(each.index for each in self._gradients)
        else:
            op, carried = "all_reduce", tuple(self._plan.messages[place].gradients)
        self._exchanges.append(
            replace(
                _exchange(op if together else "send", ranks, step),
                queue=self._queue if together else NULL,
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

    def _dispatched(self) -> Dispatched:
        return Dispatched(self._schedule, self._plan, self._signals, self._numbers)

    @property
    def _is_ddp(self) -> bool:
        """Whether PyTorch itself runs it."""
        return isinstance(self._strategy.schedule, DdpBuckets) and not (
            self._strategy.encodes or self._strategy.architecture
        )

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
        return more if self._is_ddp or self._ops else more + self._more_of_messages_us()

    def _more_of_messages_us(self) -> float:
        """The part of that for messages which PyTorch does not send."""
        gradients = 0 if self._averages is not None else len(self._gradients)
        measured = [cost.processor_ns for cost in self._costs if cost.processor_ns is not None]
        if self._calibration is not None and len(measured) == len(self._costs):
            slower = (_SLOWER_HERE - 1) * sum(measured) / 1e3 if self._strategy.encodes else 0.0
            return slower + gradients * self._calibration.gradient_us
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
        codec = compose(strategy.codec, strategy.feedback) if strategy.encodes else None
        if codec is None:
            return [self._plain(message) for message in self._plan.messages]
        return [self._encoded(message, codec) for message in self._plan.messages]

    def _encoded(self, message: Message, codec: CodecDescription) -> _Cost:
        """What a message costs that a codec shortens."""
        ranks, architecture = self._ranks, self._strategy.architecture
        sizes = [
            (part.elements, self._gradients[self._order[part.gradient]].element_bytes)
            for part in message.slices
        ]
        form = codec.exchange(message.elements, ranks)
        if isinstance(architecture, Architecture):
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
        if isinstance(architecture, Architecture):
            size = message.bytes / max(message.elements, 1)
            return _Cost(*self._over(architecture, message.elements, size), processor_ns=measured)
        size = bytes_on_link("all_reduce", ranks, message.bytes)
        return _Cost(size, messages_in_a_row("all_reduce", ranks), processor_ns=measured)

    def _over(
        self, architecture: Architecture, elements: int, element_bytes: float
    ) -> tuple[float, int]:
        """Bytes on the busiest link, and messages in a row, of a sum over an architecture."""
        plan = architecture.plan(range(self._ranks), elements)
        return sum(_busiest(each, element_bytes) for each in plan), len(plan)

    def _items(self, place: int, signal_of: dict[tuple[int, int], int]) -> Items:
        """The items of a rank, with gradients that become ready, and waits for the new messages."""
        items, work = self._program.items[place], self._work[place]
        gone = np.array([_carries_gradients(each) for each in self._program.exchanges] + [False])
        kept = ~gone[items.exchange]
        clock = _OwnTime(items, work)
        points = [
            (float(clock.at(time_)), order, kind, number)
            for order, (time_, kind, number) in enumerate(self._points(place, signal_of))
        ]
        own = np.cumsum(work)
        at = np.concatenate([own[kept], [point[0] for point in points]])
        kind = np.concatenate([items.kind[kept], [point[2] for point in points]]).astype(np.int64)
        exchange = np.concatenate([items.exchange[kept], [point[3] for point in points]])
        delay = self._delays(items, ~kept & (items.kind == LAUNCH), clock)
        added = [delay(point[0]) if point[2] == LAUNCH else 0.0 for point in points]
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
        if self._calibration is not None:
            between[(kind == LAUNCH) & np.isin(exchange, self._ready)] += (
                self._calibration.gradient_us * 1e3
            )
        if self._schedule.wait == "next_update":  # one half before its messages start
            more = _DELAYED_UPDATE / 2 * self._updates_ns(place)
            ended = [number for (_, index), number in signal_of.items() if index == NULL]
            between[(kind == LAUNCH) & np.isin(exchange, ended)] += more
            between[kind == STEP_END] += more
        if self._update_ns is not None:
            updates = self._updates_ns(place) * shares[:-1]
            # What accumulates gradients updates in some steps only.
            steps = range(len(updates))
            changed = [self._averages is not None or step in self._numbers for step in steps]
            more = np.where(changed, self._update_ns - updates, 0.0)
            between[kind == STEP_END] = np.maximum(between[kind == STEP_END] + more, 0.0)
        return Items(kind, exchange, between, extra, begin, until, step)

    def _updates_ns(self, place: int) -> FloatArray:
        """How long a rank's optimizer takes in each step."""
        rank = self._program.ranks[place]
        starts, ends = step_bounds(self._joined, rank, self._program.steps)
        return lengths_within(self._joined.work[rank]["update"], starts, ends).astype(float)

    def _update_begins(self, place: int) -> list[int]:
        """When a rank's update begins in each step, in the trace."""
        rank = self._program.ranks[place]
        time_, update = self._joined.scans[rank].gradient_time, self._joined.work[rank]["update"]
        starts, ends = step_bounds(self._joined, rank, self._program.steps)
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
        if not any(cost.encode_ns or cost.decode_ns for cost in self._costs):
            return added
        carriers: dict[int, list[int]] = {}
        for place, message in enumerate(self._plan.messages):
            last = max(message.gradients, key=self._order.__getitem__)
            carriers.setdefault(last, []).append(place)
        for row, number in enumerate(exchange.tolist()):
            if kind[row] == LAUNCH and number in self._signals:
                _, gradient = self._signals[number]
                for place in carriers.get(gradient, ()):
                    added[row] += self._costs[place].encode_ns
            elif kind[row] == LAUNCH and number in self._cost_of:
                added[row] += self._cost_of[number].encode_ns
            elif kind[row] == WAIT and number in self._cost_of and row + 1 < len(kind):
                added[row + 1] += self._cost_of[number].decode_ns
        return added

    def _points(
        self, place: int, signal_of: dict[tuple[int, int], int]
    ) -> Iterator[tuple[int, int, int]]:
        """Time, kind and exchange of what a rank does for the strategy."""
        program, joined = self._program, self._joined
        rank = program.ranks[place]
        scan = joined.scans[rank]
        update = joined.work[rank]["update"].start
        starts, ends = step_bounds(joined, rank, program.steps)
        begins = self._update_begins(place) if self._ops else []
        for step, number in enumerate(program.steps.tolist()):
            if self._averages is not None:  # after the update
                for kind, numbers in ((LAUNCH, self._numbers), (WAIT, self._due)):
                    for each in numbers.get(step, ()):
                        if place in self._exchanges[each].places:
                            yield int(ends[step]) - 1, kind, each
                continue
            if step not in self._numbers:
                continue
            rows = np.flatnonzero(scan.gradient_step == number)
            time_ = dict(zip(scan.gradient_tensor[rows], scan.gradient_time[rows], strict=True))
            last = int(max(time_.values(), default=ends[step] - 1))
            if self._ops:
                for each in self._numbers[step]:
                    yield from ((begins[step], kind, each) for kind in (LAUNCH, WAIT))
                continue
            for gradient in self._gradients:
                ready = min(int(time_.get(gradient.index, last)), int(ends[step]) - 1)
                yield ready, LAUNCH, signal_of[step, gradient.index]
            ended = int(ends[step]) - 1
            if self._schedule.wait != "next_update":  # it starts its messages after the update
                ended = min(last + 1, ended)
            yield ended, LAUNCH, signal_of[step, NULL]
            yield from self._waits(place, step, starts=starts, ends=ends, update=update, last=last)

    def _waits(
        self,
        place: int,
        step: int,
        *,
        starts: IntArray,
        ends: IntArray,
        update: IntArray,
        last: int,
    ) -> Iterator[tuple[int, int, int]]:
        """Where a rank waits for the messages of a step."""
        messages = self._numbers[step]
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


class _Served(_Exchanged):
    """Makes the program of a rule by which workers push to servers and read from them."""

    def edit(self) -> Edit:
        """The program with pushes, the servers' work and replies, and its work."""
        program, strategy = self._program, self._strategy
        if self._ranks != len(program.ranks):
            raise Refused("what its servers do is simulated for the ranks of the trace only")
        rule, steps = strategy.synchronization, range(len(program.steps))
        assert isinstance(rule, ServerRule)
        servers = self._servers()
        self._random = np.random.default_rng(0)
        self._update_ns = 0.0  # the job's own optimizer updates nothing
        self._beside.update(steps)
        self._numbers = {step: [] for step in steps}
        self._visits = [self._visits_of(each, servers) for each in range(len(program.ranks))]
        made = [self._items(worker, {}) for worker in range(len(program.ranks))]
        work = [items.work for items in made]
        seconds = np.array([np.bincount(each.step, each.work, len(steps)) / 1e9 for each in made])
        edited = replace(
            program,
            items=made,
            exchanges=self._exchanges,
            in_flight={**program.in_flight, **{server.queue: 1 for server in servers}},
            controller=lambda: Served(rule, self._visits, seconds),
        )
        return Edit(edited, work, 1, len(self._gradients) * _GRADIENT_US)

    def _planned(self) -> tuple[MessagePlan, list[range]]:
        return MessagePlan([], []), []

    def _message_costs(self) -> list[_Cost]:
        return []

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
        lowest = min(NULL, *(each.queue for each in self._exchanges))
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
                    queue=lowest - 1 - number,
                    push=_Cost(sent, 1, encode * coded, decode * coded),
                    reply_bytes=values,
                    share=load / max(sum(placed.loads), 1),
                )
            )
        self._costs = [server.push for server in servers]
        return servers

    def _visits_of(self, worker: int, servers: Sequence[_Server]) -> list[list[_Visit]]:
        """Adds what a worker exchanges with the servers in each step."""
        network, update_ns = self._network, float(np.median(self._updates_ns(worker)))
        on_machine = network.machines.count(network.machines[worker])
        message = replace(
            _exchange("send", np.array([worker]), 0),
            rounds=1,
            processor_ns=network.overhead_ns / on_machine,  # of a round, in which all ranks send
            tensors=len(self._gradients),
            carried=tuple(gradient.index for gradient in self._gradients),
        )
        return [
            [self._visit(replace(message, step=step), server, update_ns) for server in servers]
            for step in range(len(self._program.steps))
        ]

    def _visit(self, message: Exchange, server: _Server, update_ns: float) -> _Visit:
        """Adds a push, the server's work and a reply.

        Args:
            message: What a message of the worker has whatever it carries.
            update_ns: What an update of all parameters takes.
        """
        (worker,), first = message.places.tolist(), len(self._exchanges)
        push = replace(
            message,
            weight=self._random.uniform(*_UNEVEN),
            bytes=round(server.push.link_bytes),
            link_bytes=server.push.link_bytes,
            ends=(worker, server.home),
        )
        reply = replace(
            message,
            op="recv",
            weight=self._random.uniform(*_UNEVEN),
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

    def _points(
        self, place: int, signal_of: dict[tuple[int, int], int]
    ) -> Iterator[tuple[int, int, int]]:
        """Where a rank pushes, and waits for the parameters."""
        del signal_of
        for step, begin in enumerate(self._update_begins(place)):
            yield from ((begin, LAUNCH, visit.push) for visit in self._visits[place][step])
            yield from ((begin, WAIT, visit.reply) for visit in self._visits[place][step])


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


def _exchange(op: str, ranks: IntArray, step: int) -> Exchange:
    return Exchange(
        op=op,
        group="",
        queue=NULL,
        places=ranks,
        bytes=0,
        transfer=np.zeros(len(ranks)),
        needs=None,
        tensors=0,
        step=step,
    )


def _busiest(transfers: Round, element_bytes: float) -> float:
    """Bytes that the busiest rank sends or receives in a round."""
    loads: Counter[tuple[str, int]] = Counter()
    for each in transfers:
        for end in (("out", each.source), ("in", each.target)):
            loads[end] += each.stop - each.start
    return max(loads.values(), default=0) * element_bytes


def _ranks_per_processor(joined: JoinedSteps) -> float:
    """How many ranks share a processor while all of them encode; 1 if that is not known."""
    trace = joined.trace
    uses = host_uses(trace, joined.steady)
    machines = Counter(trace.infos(rank)[-1].clock_domain.partition(" ")[0] for rank in trace.ranks)
    if not uses:
        return 1.0
    return max(max(machines.values()) / max(use.processors for use in uses), 1.0)
