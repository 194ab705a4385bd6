"""Observes a user's job from inside of its ranks, for ``ddltrace experiment run -- COMMAND``.

The loss of a step is the scalar on which the job calls ``backward()``, divided by a gradient
scaler's factor. Every rank writes one file when it ends. A failure of the observer does not affect
the job; the rank then writes no file.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddltrace.experiments.observation.notes import reported_choices, reported_restrictions
from ddltrace.experiments.observation.outcomes import ENVIRONMENT_VARIABLE, part_path
from ddltrace.experiments.observation.peak_memory import peak_memory_bytes
from ddltrace.experiments.observation.step_count import StepCount
from ddltrace.experiments.observation.wire_bytes import tcp_bytes_sent


def install_if_asked() -> None:
    """Observes this process if the environment variable is set."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return
    with _handled():
        options = json.loads(text)
        JobObserver(Path(options["outcome"]), options["warmup"], options["steps"]).install()


class JobObserver:
    """Counts the steps of the job, and keeps each step's loss."""

    def __init__(self, outcome: Path, warmup: int, steps: int) -> None:
        """Stores the settings; arguments as of `outcomes.environment`."""
        self._outcome = outcome
        self._warmup = warmup
        self._steps = steps
        self._count = StepCount()
        self._unscaled: torch.Tensor | None = None
        self._of_this_step: list[torch.Tensor] = []
        self._losses: list[torch.Tensor | None] = []
        self._sent: tuple[int | None, int | None] = (None, None)

    def install(self) -> None:
        """Observes backward passes, gradient scalers and optimizer steps of this process."""
        _after_call(torch.Tensor, "backward", self._backward_called)
        _after_call(torch.amp.GradScaler, "scale", self._scaled)
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._write)

    def _scaled(self, result: Any, _scaler: Any, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
            self._unscaled = outputs.detach()

    def _backward_called(self, _: Any, loss: torch.Tensor, *__: Any) -> None:
        if loss.numel() == 1:
            value = loss if self._unscaled is None else self._unscaled
            self._of_this_step.append(value.detach().reshape(()).float())
        self._unscaled = None

    def _stepped(self, *_: Any) -> None:
        with _handled():
            if not self._count.is_first_update():
                return
            own, self._of_this_step = self._of_this_step, []
            self._losses.append(torch.stack(own).mean() if own else None)
            if len(self._losses) == self._warmup:
                self._sent = (tcp_bytes_sent(), None)
            elif len(self._losses) == self._steps:
                self._sent = (self._sent[0], tcp_bytes_sent())

    def _write(self) -> None:
        with _handled():
            before, after = self._sent
            measured = self._steps - self._warmup
            sent = None if before is None or after is None else (after - before) / measured
            known = [loss for loss in self._losses if loss is not None]
            value = {
                "losses": [float(loss) for loss in known]
                if len(known) == len(self._losses)
                else [],
                "wire_bytes": sent,
                "digest": None,
                "peak_memory": peak_memory_bytes(),
                "notes": reported_restrictions(),
                "choices": reported_choices(),
            }
            if self._losses:
                rank = int(os.environ.get("RANK", "0"))
                part_path(self._outcome, rank).write_text(json.dumps(value), encoding="utf-8")


def _after_call(owner: type[Any], name: str, observe: Callable[..., None]) -> None:
    """Calls `observe` with the result and the arguments of every call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def observed(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        with _handled():
            observe(result, *arguments)
        return result

    setattr(owner, name, observed)


@contextlib.contextmanager
def _handled() -> Iterator[None]:
    with contextlib.suppress(Exception):
        yield
