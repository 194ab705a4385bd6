"""Real ranks with paced layers and a paced link, beside schedules computed by hand.

Layers sleep for their forward and backward times, and the link is one at a time: a message
occupies it for a time in proportion to its elements, after the messages before it. Gradients, the
engine, its threads and Gloo's all-reduces are real. Prints the measured time of a step in units and
its ratio to the computed one. The computed time leaves out what a message costs beside its time on
the link, such as the agreement on the next slice: the shorter the unit, the larger its share. Use,
on an idle machine:

    torchrun --nproc-per-node 2 benchmarks/paced_schedules.py [--unit-ms 100] [--steps 6]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine import take_over
from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.messages.message_exchange import AllReduce, Handle
from ddltrace.experiments.messages.message_plan import Message
from ddltrace.experiments.pacing.paced_layers import PacedLayers
from ddltrace.experiments.pacing.profile import PaceProfile
from ddltrace.experiments.strategy.spec import parse

ELEMENTS_PER_UNIT: Final = 4000
WARMUP: Final = 3


@dataclass(frozen=True)
class Fixture:
    """One step computed by hand.

    Attributes:
        name: The name that identifies it.
        spec: The schedule.
        forward: Time of the forward pass of each layer, in units.
        backward: Time of the backward pass of each layer, in units.
        sizes: Elements of the weights of each layer.
        expected: Time of a step in the steady state, in units.
    """

    name: str
    spec: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sizes: tuple[int, ...]
    expected: float


_HALVES: Final = ((0.5, 0.5), (1.0, 1.0), (6000, 6000))
_LATE: Final = ((1.0,) * 3, (1.0,) * 3, (4000, 4000, 20_000))
_EARLY: Final = ((1.0,) * 3, (1.0,) * 3, (20_000, 4000, 4000))
FIXTURES: Final = (
    Fixture("two layers", "fifo", *_HALVES, 6.0),
    Fixture("two layers", "wfbp", *_HALVES, 5.0),
    Fixture("large output layer", "wfbp", *_LATE, 11.0),
    Fixture("large output layer", "tictac", *_LATE, 10.0),
    Fixture("large output layer", "p3:slice=1000", *_LATE, 9.0),
    Fixture("large input layer", "wfbp", *_EARLY, 11.0),
    Fixture("large input layer", "p3:slice=1000", *_EARLY, 11.0),
)


class PacedLink(AllReduce):
    """An all-reduce that occupies a link for a time in proportion to its elements.

    Attributes:
        events: What happened: ``[what, gradient, seconds]``.
    """

    def __init__(self, group: dist.ProcessGroup, unit_s: float, events: list[Any]) -> None:
        super().__init__(group)
        self._unit_s = unit_s
        self._free = 0.0
        self.events = events

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Launches the all-reduce and books the link."""
        now = time.perf_counter()
        gradient = message.slices[0].gradient
        self.events.append(["start", gradient, now])
        self._free = max(now, self._free) + self._unit_s * message.elements / ELEMENTS_PER_UNIT
        return _OnLink(super().start(message, payload), self._free, gradient, self.events)


class _OnLink:
    def __init__(self, inner: Handle, end: float, gradient: int, events: list[Any]) -> None:
        self._inner, self._end = inner, end
        self._gradient, self._events = gradient, events

    def wait(self) -> torch.Tensor:
        """The average, when the link has carried it."""
        average = self._inner.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))
        self._events.append(["end", self._gradient, time.perf_counter()])
        return average


def model_of(sizes: Sequence[int]) -> nn.Sequential:
    """A chain of layers whose weights have these numbers of elements."""
    width = 40
    layers = []
    for size in sizes:
        height = size // width
        layers.append(nn.Linear(width, height, bias=False))
        width = height
    return nn.Sequential(*layers)


def run(fixture: Fixture, unit_s: float, steps: int) -> tuple[float, list[list[Any]]]:
    """Trains some steps.

    Args:
        fixture: Layers and schedule.
        unit_s: Seconds of a unit.
        steps: Number of steps, besides those that warm up.

    Returns:
        The median time of a step in seconds, and the events of the last complete step.
    """
    torch.manual_seed(0)
    model = model_of(fixture.sizes)
    pace = PaceProfile(
        fixture.name,
        "by hand",
        tuple(1e6 * unit_s * t for t in fixture.forward),
        tuple(1e6 * unit_s * t for t in reversed(fixture.backward)),
    )
    PacedLayers(model, pace)
    events: list[list[Any]] = []
    create = take_over.create_message_exchange
    take_over.create_message_exchange = lambda _, group: PacedLink(group, unit_s, events)
    try:
        exchange = attach(model, parse(fixture.spec))
    finally:
        take_over.create_message_exchange = create
    for index, parameter in enumerate(model.parameters()):
        # Before the engine's own hooks, which send the gradient.
        parameter.register_hook(lambda _, i=index: events.append(["ready", i, time.perf_counter()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(2, 40, requires_grad=True)
    begins: list[tuple[float, int]] = []
    for _ in range(WARMUP + steps + 1):
        begins.append((time.perf_counter(), len(events)))
        optimizer.zero_grad()
        exchange.model(inputs).square().mean().backward()
        optimizer.step()
    exchange.close()
    times = [b[0] - a[0] for a, b in itertools.pairwise(begins)][WARMUP:]
    # Slices of a step may still be under way when the next one begins.
    last = events[begins[-1][1] :]
    return statistics.median(times), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--events", type=Path, help="write rank 0's events of one step as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    unit_s = options.unit_ms / 1e3
    found: dict[str, list[list[Any]]] = {}
    for fixture in FIXTURES:
        measured, events = run(fixture, unit_s, options.steps)
        found[f"{fixture.spec} {fixture.name}"] = events
        if dist.get_rank() == 0:
            units = measured / unit_s
            print(
                f"{fixture.name:20} {fixture.spec:14} {units:6.2f} units, computed "
                f"{fixture.expected:5.2f}: ratio {units / fixture.expected:.3f}",
                flush=True,
            )
    if dist.get_rank() == 0 and options.events is not None:
        options.events.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
