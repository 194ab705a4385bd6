"""What strategies compute, timed on this machine: codecs, updates, and what updates send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from ddltrace.analyzer.whatif.questions import Refused
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.frequency.frequency import Frequency, StepContext
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.tracer.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_CACHED: Final = 1 << 25
"""Bytes of other data that replace what caches hold before an update is timed."""

_UPDATES: Final = 5
_LONG_NS: Final = 1e9
"""How many updates are timed, and after which time no more."""

_MOST_UPDATED: Final = 1 << 25
"""Elements of the largest model whose update is timed."""

_SAMPLE: Final = 1 << 20
"""Elements of the tensor with which codecs are timed."""


@cache
def codec_ns_per_element(description: CodecDescription) -> tuple[float, float]:
    """Time to encode and to decode an element on one core, ns.

    Raises:
        Refused: The codec cannot be timed.
    """
    try:
        with _one_thread():
            codec = description.codec(0)
            tensor = torch.randn(_SAMPLE // 1024, 1024, generator=torch.Generator().manual_seed(0))
            times = []
            for _ in range(4):
                begin = time.perf_counter_ns()
                payload = codec.encode(tensor, key=0)
                middle = time.perf_counter_ns()
                codec.decode(payload)
                times.append((middle - begin, time.perf_counter_ns() - middle))
    except UsageError as error:
        raise Refused(f"its codec could not be timed: {error}") from error
    encode, decode = np.median(times[1:], axis=0) / _SAMPLE
    return float(encode), float(decode)


def rule_ns(rule: OptimizerRule, gradients: Sequence[Gradient]) -> float:
    """Processor time of an update by a rule on one core, ns.

    Every tensor with two dimensions or more counts as that of a hidden layer.

    Raises:
        Refused: The model is too large.
    """
    parameters, optimizer = _model(gradients)

    def update() -> list[int]:
        begin = time.process_time_ns()
        rule.update(optimizer, optimizer.param_groups[0], parameters)
        return [time.process_time_ns() - begin]

    return _medians(update)[0]


def mean_ns(gradients: Sequence[Gradient], others: int) -> tuple[float, float]:
    """Processor time in which a rank replaces its parameters by the mean with those of others, ns.

    Args:
        gradients: Those of the model.
        others: How many other ranks.

    Returns:
        Of the copy that is sent, and of the mean of all that were received.

    Raises:
        Refused: The model is too large.
    """
    parameters, _ = _model(gradients)
    sizes = [parameter.numel() for parameter in parameters]
    received = [torch.ones(sum(sizes)) for _ in range(others)]

    def average() -> list[int]:
        begin = time.process_time_ns()
        own = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        copied = time.process_time_ns()
        mean = torch.stack([own, *received]).sum(0) / (1 + others)
        for parameter, part in zip(parameters, torch.split(mean, sizes), strict=True):
            parameter.data.copy_(part.view_as(parameter))
        return [copied - begin, time.process_time_ns() - copied]

    before, after = _medians(average)
    return before, after


@dataclass(frozen=True)
class Sent:
    """A message of an update.

    Attributes:
        op: The operation.
        bytes: Its size; of an all_gather, that of all ranks' parts together.
        before_ns: Processor time of a rank from the message before, or the update's start.
    """

    op: str
    bytes: int
    before_ns: float


@dataclass(frozen=True)
class OwnUpdate:
    """An update that sends messages itself.

    Attributes:
        sent: The messages, each awaited before the rank goes on.
        after_ns: Processor time after the last one.
    """

    sent: tuple[Sent, ...]
    after_ns: float


def own_update(frequency: Frequency, gradients: Sequence[Gradient], ranks: int) -> OwnUpdate:
    """What a technique that updates in place of the optimizer computes and sends in a step.

    Its policy runs here, with this process in the place of every rank. Every tensor with two
    dimensions or more counts as that of a hidden layer.

    Args:
        frequency: The technique; it exchanges momentum.
        gradients: Those of the model.
        ranks: Number of ranks.

    Raises:
        Refused: The model is too large, or the update needs other ranks.
    """
    parameters, optimizer = _model(gradients)
    alone = _Alone(ranks)
    nothing = cast(Any, None)  # groups and exchanges, which such a policy does not use
    named = [("", parameter) for parameter in parameters]
    context = _AloneContext("", named, nothing, nothing, nothing, alone=alone)

    def update() -> list[int]:
        alone.begin()
        with torch.no_grad():
            policy.before_update(optimizer)
        return alone.end()

    try:
        policy = frequency.policy(context)
        *before, after = _medians(update)
    except Refused:
        raise
    except Exception as error:  # a technique of the user's own may do anything
        raise Refused(f"its update does not run without other ranks: {error!r:.200}") from error
    return OwnUpdate(
        tuple(Sent(op, size, ns) for (op, size), ns in zip(alone.sent, before, strict=True)), after
    )


class _Alone(Collectives):
    """Collectives in which one process stands for every rank.

    Attributes:
        sent: Operation and bytes of the messages of the update.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.sent: list[tuple[str, int]] = []

    def begin(self) -> None:
        """An update begins."""
        self.sent, self._times = [], list[int]()
        self._since = time.process_time_ns()

    def end(self) -> list[int]:
        """Processor time before each message and after the last one, ns."""
        return [*self._times, time.process_time_ns() - self._since]

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0

    def all_reduce(self, vector: torch.Tensor) -> _Done:
        return self._send("all_reduce", vector.nbytes, lambda: vector.mul_(self._ranks))

    def all_gather(self, received: list[torch.Tensor], data: torch.Tensor) -> _Done:
        return self._send(
            "all_gather",
            data.nbytes * self._ranks,
            lambda: [each.copy_(data) for each in received],
        )

    def maximum(self, vector: torch.Tensor) -> None:
        raise Refused("what it sends is not simulated: experiment run measures it")

    def all_to_all(self, *_: object) -> _Done:
        raise Refused("what it sends is not simulated: experiment run measures it")

    def _send(self, op: str, size: int, deliver: Callable[[], object]) -> _Done:
        self._times.append(time.process_time_ns() - self._since)
        self.sent.append((op, size))
        deliver()
        self._since = time.process_time_ns()
        return _Done()


class _Done:
    def wait(self) -> None:
        return


@dataclass(frozen=True)
class _AloneContext(StepContext):
    """The context of a policy that runs without other ranks."""

    alone: Collectives = field(kw_only=True)

    @property
    def collectives(self) -> Collectives:
        return self.alone


def _model(gradients: Sequence[Gradient]) -> tuple[list[torch.nn.Parameter], Optimizer]:
    """Parameters of these shapes with random gradients, and an optimizer of them."""
    if sum(gradient.elements for gradient in gradients) > _MOST_UPDATED:
        raise Refused(f"updates of more than {_MOST_UPDATED:,} elements are not timed here")
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.randn(gradient.shape))
        parameter.grad = torch.randn(gradient.shape)
        parameters.append(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1e-3)


def _medians(update: Callable[[], list[int]]) -> list[float]:
    """The median of each time of some updates, ns."""
    other, times = torch.ones(_CACHED // 4), list[list[int]]()
    with _one_thread():
        while len(times) < _UPDATES and sum(map(sum, times)) < _LONG_NS:
            other.add_(1.0)  # in a job, the caches hold other data before an update
            times.append(update())
    found: list[float] = np.median(times[1:] or times, axis=0).tolist()
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
