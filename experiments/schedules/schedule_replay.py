"""Replays a schedule on given times of computation and communication, without a job.

The schedule's own plan and dispatcher decide, as in the engine; the clock is the replay's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import Gradient, Message
from ddltrace.experiments.schedules.base import Schedule


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
    gradients = []
    now = 0.0
    for index, layer in reversed(list(enumerate(layers))):
        now += layer.backward
        gradients.append(Gradient(index, f"layer{index}", layer.elements, use=index, ready_us=now))
    plan = schedule.plan(gradients)
    dispatcher = schedule.dispatcher(plan)
    if schedule.wait == "next_update":
        computation = now + sum(layer.forward for layer in layers)
        return _steady_step(computation, sum(map(duration_of, dispatcher.backward_ended())))
    numbers = itertools.count()
    events: list[tuple[float, int, int | Message | None]] = []
    for gradient in gradients:
        heapq.heappush(events, (gradient.ready_us or 0.0, next(numbers), gradient.index))
    backward_end = now
    heapq.heappush(events, (backward_end, next(numbers), None))
    link_free = 0.0
    done: dict[int, float] = {}
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Message):
            done[event.number] = now
            started = dispatcher.completed(event)
        elif event is None:
            started = dispatcher.backward_ended()
        else:
            started = dispatcher.gradient_ready(event)
        for message in started:
            link_free = max(link_free, now) + duration_of(message)
            heapq.heappush(events, (link_free, next(numbers), message))
    clock = backward_end
    for index, layer in enumerate(layers):
        by_layer = schedule.wait == "layer"
        needed = plan.carriers[index] if by_layer else range(len(plan.messages))
        clock = max([clock, *(done[number] for number in needed)]) + layer.forward
    return clock


def _steady_step(computation: float, exchange: float) -> float:
    """Time between two updates, each of which waits for what the one before has sent.

    Args:
        computation: Duration of one forward and one backward pass.
        exchange: Duration of all messages of a step, which start at its update.
    """
    update = landed = previous = 0.0
    for _ in range(3):
        previous = update
        update = max(update + computation, landed)
        landed = update + exchange
    return update - previous
