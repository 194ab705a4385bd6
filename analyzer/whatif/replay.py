"""Replays a program: when every rank ends every step, given how long messages take.

The replay is a discrete-event simulation. Ranks whose items in a step are the same advance
together, as vectors, until they wait for a message that is not complete. Then the message that
completes first completes, the ranks that waited for it go on, and so forth. What they launch is
later than that, so messages complete in the order of time. Cost: linear in the items, with one
Python iteration for each item of ranks that do the same.

Messages take their recorded transfer, or share resources: then each has a latency, and demands on
the links of its hosts and the processors of its machines, which messages in flight at the same time
share max-min fairly. It is complete when all its demands are met, at the same time or in turn.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray, IntArray
from ddltrace.analyzer.whatif.program import (
    LAUNCH,
    SIGNAL,
    STEP_END,
    WAIT,
    Exchange,
    Items,
    Program,
)
from ddltrace.tracer.errors import TraceError


@dataclass(frozen=True)
class Demand:
    """What an exchange needs of resources of one kind.

    Attributes:
        resources: The links or processors that it uses, all of them at the same time.
        busy_ns: How long it keeps the busiest of them busy if nothing else uses them.
        weight: Its share of a resource is in proportion to this.
    """

    resources: tuple[int, ...]
    busy_ns: float
    weight: float = 1.0


@dataclass(frozen=True)
class LinkUse:
    """What an exchange costs on resources that it may share.

    Attributes:
        latency_ns: Before its demands begin.
        demands: Those of no length are left out.
        in_turn: Whether they are met one after another instead of at the same time.
    """

    latency_ns: float
    demands: tuple[Demand, ...]
    in_turn: bool = False


_COMPLETE, _FLOWS, _SIGNALLED = range(3)
"""What happens at an event: an exchange completes, its demands begin, or a signal."""

LinkModel = Callable[[Exchange], LinkUse]


@dataclass
class _State:
    """An exchange during a replay.

    Attributes:
        launched: When each member launched it; NaN if not yet.
        missing: Members that have not.
        done: When it was complete on each member; None if not yet.
        waiting: Walkers that wait for it.
        arrived: When each member had launched it and its queue had room.
        release: When each member was released.
        use: What it costs on links; None if it takes its recorded transfer, or before it starts.
        unmet: How many of its demands are not met yet.
    """

    launched: FloatArray
    missing: int
    done: FloatArray | None = None
    waiting: list[_Walker] = field(default_factory=list)
    arrived: FloatArray | None = None
    release: FloatArray | None = None
    use: LinkUse | None = None
    unmet: int = 0


@dataclass
class _Walker:
    """Ranks with the same items in a step.

    Attributes:
        ranks: Their places.
        step: Index of the step.
        kind: Kinds of the items.
        exchange: Exchanges of the items.
        work: Work before each item, shape (items, ranks).
        extra: As in `Items`, shape (items, ranks).
        at: The next item.
        time: Where each rank is.
        first: Index of each rank's first item of the step.
    """

    ranks: IntArray
    step: int
    kind: list[int]
    exchange: list[int]
    work: FloatArray
    extra: FloatArray
    at: int
    time: FloatArray
    first: list[int]


@dataclass(frozen=True)
class ItemTimes:
    """When a rank did what, ns; one value for each item.

    Attributes:
        begin: When the work before it began.
        until: When that work ended.
        after: When the rank went on: later than `until` if it waited.
    """

    begin: FloatArray
    until: FloatArray
    after: FloatArray


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay.

    Attributes:
        ends: When each rank ends each step, ns, shape (steps, ranks).
        waited: How long each rank waits for messages in each step, ns, shape (steps, ranks).
        worked: How long each rank works in each step, ns, shape (steps, ranks).
        spans: When each exchange was released on its last member, and complete on its last one, ns.
        launched: When each member launched each exchange, ns; NaN if it did not.
        arrived: When its queue had room as well; None if it was not launched by all.
        done: When each exchange was complete on each member; None if it was not launched by all.
        items: What each rank did; empty unless it was to be kept.
    """

    ends: FloatArray
    waited: FloatArray
    worked: FloatArray
    spans: list[tuple[float, float]]
    launched: list[FloatArray]
    arrived: list[FloatArray | None]
    done: list[FloatArray | None]
    items: list[ItemTimes]


@dataclass
class _Flow:
    """A demand that is being met.

    Attributes:
        number: Its exchange.
        resources: The links or processors.
        left: How long what is left keeps the busiest of them busy alone, ns.
        weight: As in `Demand`.
        rate: The share of them that it has.
    """

    number: int
    resources: tuple[int, ...]
    left: float
    weight: float
    rate: float = 0.0


class Replay:
    """One replay of a program.

    Args:
        work: Own work before each item, one array per rank; by default as recorded.
        links: What exchanges cost on links; None to take their recorded transfers.
        keeps_items: Whether to keep when each rank did what.
    """

    def __init__(
        self,
        program: Program,
        work: Sequence[FloatArray] | None = None,
        links: LinkModel | None = None,
        *,
        keeps_items: bool = False,
    ) -> None:
        self._program, self._links = program, links
        self._times = [
            ItemTimes(*(np.full(len(items.kind), np.nan) for _ in range(3)))
            for items in (program.items if keeps_items else [])
        ]
        self._work = [items.work for items in program.items] if work is None else work
        count = len(program.ranks), len(program.steps)
        self._states: list[_State] = [
            _State(np.full(len(each.places), np.nan), len(each.places))
            for each in program.exchanges
        ]
        self._ends = np.full((count[1], count[0]), np.nan)
        self._waited = np.zeros((count[1], count[0]))
        self._worked = np.zeros((count[1], count[0]))
        self._active: defaultdict[int, int] = defaultdict(int)
        self._queued: defaultdict[int, deque[int]] = defaultdict(deque)
        self._events: list[tuple[float, int, int]] = []
        self._flows: list[_Flow] = []
        self._flow_time = 0.0
        self._ready: list[_Walker] = []
        self._controller = program.controller() if program.controller is not None else None

    def run(self) -> Replayed:
        """Replays all steps.

        Raises:
            TraceError: Ranks wait for each other in a circle.
        """
        self._begin_step(0, np.arange(len(self._program.ranks)), self._program.begin)
        while True:
            while self._ready:
                self._walk(self._ready.pop())
            if not self._complete_next():
                break
        if np.isnan(self._ends).any():
            raise TraceError(
                "the messages of the trace cannot be replayed: ranks wait for each other"
            )
        spans = [
            (0.0, 0.0)
            if state.release is None or state.done is None
            else (float(state.release.max()), float(state.done.max()))
            for state in self._states
        ]
        return Replayed(
            self._ends,
            self._waited,
            self._worked,
            spans,
            [state.launched for state in self._states],
            [state.arrived for state in self._states],
            [state.done for state in self._states],
            self._times,
        )

    def _begin_step(self, step: int, ranks: IntArray, time: FloatArray) -> None:
        """Groups ranks by what they do in a step."""
        groups: dict[bytes, list[int]] = {}
        for index, rank in enumerate(ranks.tolist()):
            items = self._program.items[rank]
            part = _part(items, step)
            key = items.kind[part].tobytes() + items.exchange[part].tobytes()
            groups.setdefault(key, []).append(index)
        for mine in groups.values():
            of = ranks[mine]
            parts = [_part(self._program.items[rank], step) for rank in of.tolist()]
            items = self._program.items[int(of[0])]
            work = [self._work[r][p] for r, p in zip(of.tolist(), parts, strict=True)]
            extra = [
                self._program.items[r].extra[p] for r, p in zip(of.tolist(), parts, strict=True)
            ]
            self._ready.append(
                _Walker(
                    ranks=of,
                    step=step,
                    kind=items.kind[parts[0]].tolist(),
                    exchange=items.exchange[parts[0]].tolist(),
                    work=np.array(work).T,
                    extra=np.array(extra).T,
                    at=0,
                    time=time[mine].copy(),
                    first=[part.start for part in parts],
                )
            )

    def _walk(self, walker: _Walker) -> None:
        """Advances ranks until they are blocked or the step ends."""
        work, extra, step, ranks = walker.work, walker.extra, walker.step, walker.ranks
        time = walker.time
        while walker.at < len(walker.kind):
            at = walker.at
            kind, number = walker.kind[at], walker.exchange[at]
            done = self._states[number].done if kind == WAIT else None
            if kind == WAIT and done is None:
                walker.time = time
                self._states[number].waiting.append(walker)
                return
            before, until = time, time + work[at]
            time = until
            if kind == LAUNCH:
                self._launch(number, ranks, time + extra[at])
            elif kind == STEP_END:
                self._ends[step, ranks] = time
            else:
                assert done is not None
                members = self._program.exchanges[number].places
                done = done[np.searchsorted(members, ranks)]
                waits = np.maximum(done - time, 0.0)
                self._waited[step, ranks] += waits
                time = time + waits + np.where(waits > 0, extra[at], 0.0)
            if self._times:
                for index, rank in enumerate(ranks.tolist()):
                    mine, place = self._times[rank], walker.first[index] + at
                    mine.begin[place], mine.until[place] = before[index], until[index]
                    mine.after[place] = time[index]
            walker.at += 1
        self._worked[step, ranks] += work.sum(axis=0)
        if step + 1 < len(self._program.steps):
            self._begin_step(step + 1, ranks, time)

    def _launch(self, number: int, ranks: IntArray, time: FloatArray) -> None:
        state, exchange = self._states[number], self._program.exchanges[number]
        state.launched[np.searchsorted(exchange.places, ranks)] = time
        state.missing -= len(ranks)
        if state.missing:
            return
        if exchange.op == SIGNAL:
            heapq.heappush(self._events, (float(state.launched.max()), _SIGNALLED, number))
            return
        self._enqueue(number)

    def _enqueue(self, number: int) -> None:
        """An exchange that all members have launched takes its place in its queue."""
        state, queue = self._states[number], self._program.exchanges[number].queue
        if self._active[queue] < self._program.in_flight.get(queue, len(self._states)):
            self._start(number, state.launched)
        else:
            self._queued[queue].append(number)

    def _start(self, number: int, arrival: FloatArray) -> None:
        """All members have come: releases them, and finds when the exchange completes."""
        state, exchange = self._states[number], self._program.exchanges[number]
        self._active[exchange.queue] += 1
        release = _released(arrival, exchange.needs)
        state.arrived, state.release = arrival, release
        if self._links is None:
            done = release + exchange.transfer
            heapq.heappush(self._events, (float(done.min()), _COMPLETE, number))
            return
        state.use = self._links(exchange)
        begins = float(release.max()) + state.use.latency_ns
        state.unmet = len(state.use.demands)
        kind = _FLOWS if state.unmet else _COMPLETE
        heapq.heappush(self._events, (begins, kind, number))

    def _complete_next(self) -> bool:
        """Lets what happens next happen; returns whether there was anything."""
        ends, which = self._next_flow()
        if self._events and self._events[0][0] <= ends:
            time, kind, number = heapq.heappop(self._events)
            self._advance(time)
            if kind == _SIGNALLED:
                assert self._controller is not None
                self._states[number].done = self._states[number].launched
                self._start_all(self._controller.signalled(number), time)
                return True
            if kind == _FLOWS:
                use = self._states[number].use
                assert use is not None
                self._flow(number, use.demands[:1] if use.in_turn else use.demands)
                return True
            self._complete(number, time)
            return True
        if which is None:
            return False
        self._advance(ends)
        self._flows.remove(which)
        state = self._states[which.number]
        state.unmet -= 1
        use = state.use
        assert use is not None
        following = len(use.demands) - state.unmet
        self._flow(which.number, use.demands[following : following + 1] if use.in_turn else ())
        if not state.unmet:
            self._complete(which.number, ends)
        return True

    def _flow(self, number: int, demands: Sequence[Demand]) -> None:
        """Begins to meet demands of an exchange; all flows have new shares."""
        self._flows += [
            _Flow(number, demand.resources, demand.busy_ns, demand.weight) for demand in demands
        ]
        self._share_resources()

    def _complete(self, number: int, time: float) -> None:
        state, exchange = self._states[number], self._program.exchanges[number]
        assert state.release is not None
        if self._links is None:
            state.done = state.release + exchange.transfer
        else:
            state.done = np.full(len(exchange.places), time)
        self._ready += state.waiting
        state.waiting = []
        self._active[exchange.queue] -= 1
        if self._queued[exchange.queue]:
            following = self._queued[exchange.queue].popleft()
            launched = self._states[following].launched
            places = self._program.exchanges[following].places
            freed = np.full(len(places), time)
            shared = np.isin(places, exchange.places)
            freed[shared] = state.done[np.searchsorted(exchange.places, places[shared])]
            self._start(following, np.maximum(launched, freed))
        if self._controller is not None:
            self._start_all(self._controller.completed(number), float(state.done.max()))

    def _start_all(self, numbers: Sequence[int], time: float) -> None:
        """Starts exchanges of the controller on all their ranks."""
        for number in numbers:
            self._states[number].launched[:] = time
            self._enqueue(number)

    def _share_resources(self) -> None:
        """Gives each flow its share of its resources: max-min fair, by weight."""
        left = {resource: 1.0 for flow in self._flows for resource in flow.resources}
        waiting = list(self._flows)
        while waiting:
            weights: defaultdict[int, float] = defaultdict(float)
            for flow in waiting:
                for resource in flow.resources:
                    weights[resource] += flow.weight
            tightest = min(weights, key=lambda resource: left[resource] / weights[resource])
            share = left[tightest] / weights[tightest]
            for flow in waiting:
                if tightest in flow.resources:
                    flow.rate = share * flow.weight
                    for resource in flow.resources:
                        left[resource] = max(left[resource] - flow.rate, 0.0)
            waiting = [flow for flow in waiting if tightest not in flow.resources]

    def _next_flow(self) -> tuple[float, _Flow | None]:
        """The flow that ends first, and when; None if there is none."""
        first = min(self._flows, key=lambda flow: flow.left / flow.rate, default=None)
        if first is None:
            return float("inf"), None
        return self._flow_time + first.left / first.rate, first

    def _advance(self, time: float) -> None:
        passed = max(time - self._flow_time, 0.0)
        for flow in self._flows:
            flow.left = max(flow.left - passed * flow.rate, 0.0)
        self._flow_time = max(self._flow_time, time)


def _part(items: Items, step: int) -> slice:
    low, high = np.searchsorted(items.step, [step, step + 1])
    return slice(int(low), int(high))


def _released(arrival: FloatArray, needs: IntArray | None) -> FloatArray:
    """When each member has all that it needs."""
    if needs is None:
        return np.full(len(arrival), float(arrival.max()))
    released: FloatArray = arrival.copy()
    np.maximum.at(released, needs[:, 0], arrival[needs[:, 1]])
    return released
