"""Measures a job's steps under the schedules of a search, and selects the best."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

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
