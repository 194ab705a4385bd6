"""Measures what a schedule has to know of the job: steps under its proposals, or when gradients are
ready and how long messages take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.messages.trace_marks import (
    CALIBRATION_BEGINS,
    CALIBRATION_ENDS,
    calibrating,
    mark,
)
from ddltrace.experiments.observation.notes import report_found
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.schedules.search import Search


class ScheduleSearch:
    """Runs a schedule's search along with the job, in step on all ranks.

    All ranks execute the proposals of rank 0; the duration of a step is that on the slowest rank.
    """

    def __init__(self, schedule: Schedule, search: Search, group: dist.ProcessGroup) -> None:
        self._schedule = schedule
        self._search = search
        self._group = group
        self._values: Sequence[float] | None = None
        self._steps = 0
        self._begin = 0.0
        self.over = False
        mark(CALIBRATION_BEGINS)

    def after_step(self) -> Schedule | None:
        """To be called between two exchanges, while no message is in flight. Collective.

        Returns:
            The next schedule; None to keep the current one.
        """
        if self._values is not None:
            # The first step with a new plan is not measured: it makes buffers.
            self._steps += 1
            if self._steps == 1:
                self._begin = time.monotonic()
            if self._steps <= self._schedule.search_steps:
                return None
            seconds = torch.tensor([time.monotonic() - self._begin], dtype=torch.float64)
            with calibrating("duration of steps"):
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self._group)
            self._search.observe(self._values, float(seconds) / self._schedule.search_steps)
        proposal = self._search.propose()
        self.over = proposal is None
        values = torch.tensor(
            list(self._search.best() if proposal is None else proposal), dtype=torch.float64
        )
        with calibrating("parameters"):
            dist.broadcast(values, group=self._group, group_src=0)
        self._values = values.tolist()
        self._steps = 0
        chosen = self._schedule.with_values(self._values)
        if self.over:
            mark(CALIBRATION_ENDS)
            report_found(chosen)
        return chosen


_SMALL_BYTES: Final = 1 << 10
_LARGE_BYTES: Final = 1 << 20
_REPEATS: Final = 7


class GradientTiming:
    """Measures a schedule's `timed_steps`; the ranks then agree on the times of the slowest."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup) -> None:
        self._schedule = schedule
        self._group = group
        self._begin_ns = 0
        mark(CALIBRATION_BEGINS)
        self._times: list[dict[int, float]] = []

    def begin(self) -> None:
        """To be called before a backward pass that exchanges gradients."""
        if not self._times or self._times[-1]:
            self._times.append({})
        self._begin_ns = time.perf_counter_ns()

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """To be called when a gradient has been computed, or is being computed by a GPU."""
        if gradient.is_cuda:
            torch.cuda.synchronize(gradient.device)
        self._times[-1][index] = (time.perf_counter_ns() - self._begin_ns) / 1e3

    def after_step(self, gradients: Sequence[Gradient]) -> tuple[Schedule, list[Gradient]] | None:
        """To be called between two steps, while no message is in flight. Collective.

        Args:
            gradients: Those that the schedule plans, the same on all ranks.

        Returns:
            The schedule with the times of messages, and the gradients with the times at which
            they are ready. None as long as too few steps are measured.
        """
        if len(self._times) < self._schedule.timed_steps:
            return None
        device = torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        measured = [self._median(gradient.index) for gradient in gradients]
        # A message starts when its gradients are ready on the slowest rank.
        times = torch.tensor(
            [*_time_messages(self._group, device), *measured], dtype=torch.float64, device=device
        )
        with calibrating("ready times of gradients"):
            dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._group)
        alpha, beta, *ready = times.tolist()
        last = max(ready, default=0.0)
        chosen = self._schedule.with_values((alpha, beta))
        mark(CALIBRATION_ENDS)
        report_found(chosen)
        return chosen, [
            # What no rank has ever used is ready when backward ends.
            replace(gradient, ready_us=at if at >= 0 else max(last, 0.0))
            for gradient, at in zip(gradients, ready, strict=True)
        ]

    def _median(self, index: int) -> float:
        times = [step[index] for step in self._times if index in step]
        return statistics.median(times) if times else -1.0


def _time_messages(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Start-up time of an all_reduce in microseconds, and microseconds a further MiB takes."""
    small = _time_all_reduce(group, device, _SMALL_BYTES)
    large = _time_all_reduce(group, device, _LARGE_BYTES)
    beta = max(0.0, large - small) / (_LARGE_BYTES - _SMALL_BYTES)
    return max(0.0, small - beta * _SMALL_BYTES), beta * (1 << 20)


def _time_all_reduce(group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    """Median duration in microseconds, after one that is not measured."""
    payload = torch.zeros(size // 4, device=device)
    durations = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter_ns()
        with calibrating("measurement of the network"):
            dist.all_reduce(payload, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(durations[1:])
