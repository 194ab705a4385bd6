"""Schedules on given times of computation and communication, replayed as what-if replays a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL
from ddltrace.analyzer.whatif.program import (
    LAUNCH,
    SIGNAL,
    STEP_END,
    WAIT,
    Exchange,
    Items,
    Program,
    periods,
)
from ddltrace.analyzer.whatif.replay import Replay
from ddltrace.experiments.messages.message_plan import Gradient, Message
from ddltrace.experiments.predicted import Dispatched
from ddltrace.experiments.schedules.base import Schedule

_STEPS = 4


@dataclass(frozen=True)
class Layer:
    """One layer with one parameter tensor.

    Attributes:
        forward: Duration of its forward pass.
        backward: Duration of its backward pass, at whose end its gradient is ready.
        elements: Elements of its gradient.
    """

    forward: float
    backward: float
    elements: int


def step_time(
    schedule: Schedule, layers: Sequence[Layer], duration_of: Callable[[Message], float]
) -> float:
    """Time from the begin of a backward pass to the end of the next forward pass.

    Messages share one link and travel one after the other, in the order of their start. A
    schedule that waits before the layers lets each layer's forward begin when its own messages
    are done; any other schedule when all messages are done. Updates take no time. For a
    schedule that waits at the next update, this is the time between two updates in the long run.

    Args:
        schedule: A schedule that needs no ticks.
        layers: From the input to the output, as the forward pass uses them.
        duration_of: How long a message takes on the link.
    """
    gradients, now = [], 0.0
    for index, layer in reversed(list(enumerate(layers))):
        now += layer.backward
        gradients.append(Gradient(index, f"layer{index}", layer.elements, use=index, ready_us=now))
    plan = schedule.plan(gradients)
    exchanges: list[Exchange] = []
    signals: dict[int, tuple[tuple[int, int], int]] = {}
    numbers: dict[tuple[int, int], list[int]] = {}

    def exchange(op: str, step: int, duration: float) -> int:
        alone, times = np.zeros(1, dtype=np.int64), np.array([duration])
        exchanges.append(Exchange(op, "", 0, alone, 0, times, None, 1, step))
        return len(exchanges) - 1

    rows: list[tuple[int, int, float]] = []
    for step in range(_STEPS):
        durations = [duration_of(message) for message in plan.messages]
        numbers[step, 0] = [exchange("all_reduce", step, duration) for duration in durations]
        ready = {}
        for index in [*(gradient.index for gradient in gradients), NULL]:
            ready[index] = exchange(SIGNAL, step, 0.0)
            signals[ready[index]] = ((step, 0), index)
        backward = [(LAUNCH, ready[each.index], layers[each.index].backward) for each in gradients]
        backward.append((LAUNCH, ready[NULL], 0.0))
        if schedule.wait == "next_update":
            forward = sum(layer.forward for layer in layers)
            former = [(WAIT, number, 0.0) for number in numbers.get((step - 1, 0), [])]
            rows += [*backward[:-1], (STEP_END, NULL, forward), *former, backward[-1]]
            continue
        rows += backward
        work = 0.0
        for index, layer in enumerate(layers):
            needed = (
                plan.carriers[index] if schedule.wait == "layer" else range(len(numbers[step, 0]))
            )
            for number in needed:
                rows.append((WAIT, numbers[step, 0][number], work))
                work = 0.0
            work += layer.forward
        rows.append((STEP_END, NULL, work))
    while rows[-1][0] != STEP_END:  # what follows belongs to a further step
        rows.pop()
    program = program_of([items_of(*rows)], exchanges, {0: 1})
    program.controller = lambda: Dispatched(schedule, plan, signals, numbers)
    return float(periods(Replay(program).run().ends)[-1])


def items_of(*rows: tuple[int, int, float]) -> Items:
    """Items of a rank: kind, exchange and work, ns, of each."""
    kind, exchange, work = (np.array(column) for column in zip(*rows, strict=True))
    nothing = np.zeros(len(rows), dtype=np.int64)
    step = np.append(0, np.cumsum(kind == STEP_END)[:-1])
    return Items(kind, exchange, work.astype(float), nothing * 1.0, nothing, nothing, step)


def program_of(
    items: list[Items], exchanges: list[Exchange], in_flight: dict[int, int] | None = None
) -> Program:
    """A program of ranks on hosts of their own."""
    ranks = len(items)
    steps = int(max(each.step.max() for each in items)) + 1
    return Program(
        ranks=list(range(ranks)),
        hosts=[f"host{rank}" for rank in range(ranks)],
        steps=np.arange(steps),
        items=items,
        exchanges=exchanges,
        in_flight=in_flight or {},
        begin=np.zeros(ranks),
        recorded=np.zeros((steps, ranks)),
    )
