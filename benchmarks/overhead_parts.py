"""Measures the cost of each part of the tracer in a job.

Two processes of the same code differ by more than the tracer costs, so here the parts are
switched off and on inside one job while it trains: a turn of some steps for each setting, in an
order of its own in every round. Of each setting the mean step is compared with that of the same
round with everything off; the mean, because the writer's work comes in pieces. So is the processor
time of both ranks, all their threads together: it does not include waiting between ranks, but
varies less. Prints the numbers of docs/measurements.md::

    python benchmarks/overhead_parts.py                # six minutes
    python benchmarks/overhead_parts.py --only everything --rounds 600 --steps 4
    python benchmarks/overhead_parts.py --level comm --only everything --rounds 300

The job is the residual CNN of `overhead.py` under DistributedDataParallel, two ranks over Gloo.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from overhead import NUM_RANKS, interval, make_step, run_traced

WARM_UP_STEPS = 30
SETTLING_STEPS = 2  # of each turn, not counted
EVERYTHING = frozenset({"layers", "phases", "gradients", "messages", "writer"})
SETTINGS: dict[str, frozenset[str]] = {
    "nothing": frozenset(),
    "everything": EVERYTHING,
    **{f"all but {part}": EVERYTHING - {part} for part in sorted(EVERYTHING)},
    "writer alone": frozenset({"writer"}),
}


Turns: TypeAlias = dict[str, list[tuple[float, float]]]
"""Of each setting: the mean step of each turn, and its processor time."""


class Paused:
    """A recorder that leaves out what C++ would record: it is launched as if untraced."""

    paused = True

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


class Switches:
    """Switches parts of the recording session of this process."""

    def __init__(self) -> None:
        import torch
        from torch import nn
        from torch.optim import optimizer

        from ddltrace.tracer.capture.session import current_session

        session: Any = current_session()
        self._writer = session._writer
        self._flush: Callable[..., None] = self._writer._flush
        self._known: Any = session.known
        if self._known is None:
            sys.exit("needs a C++ compiler: without, even what is not recorded goes through Python")
        self._recorder: Any = session.recorder
        self._gradients: Any = session.registry.native
        self._begin: Callable[..., None] = self._gradients.begin_backward
        self._module: Any = nn.Module
        self._call: Any = nn.Module.__call__
        self._autograd: Any = torch.autograd
        self._backward: Any = torch.autograd.backward
        self._of_optimizers: list[dict[Any, Any]] = [
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        ]
        self._optimizer_hooks = [dict(hooks) for hooks in self._of_optimizers]

    def _bare_backward(self, *args: Any, **kwargs: Any) -> None:
        """Only says that it runs: else C++ would leave its messages to Python."""
        self._known.begin_backward()
        try:
            self._backward.__wrapped__(*args, **kwargs)
        finally:
            self._known.end_backward(time.monotonic_ns())

    def set(self, parts: frozenset[str]) -> None:
        """Leaves on what is named."""
        self._module.__call__ = self._call if "layers" in parts else self._call.__wrapped__
        phases = "phases" in parts
        self._autograd.backward = self._backward if phases else self._bare_backward
        for hooks, kept in zip(self._of_optimizers, self._optimizer_hooks, strict=True):
            hooks.clear()
            hooks.update(kept if phases else {})
        gradients = "gradients" in parts
        self._begin(paused=not gradients)
        self._gradients.begin_backward = self._begin if gradients else lambda **_: None
        messages = "messages" in parts
        self._known._recorder = self._recorder if messages else Paused(self._recorder)
        self._writer._flush = self._flush if "writer" in parts else lambda **_: None


def work(rounds: int, steps: int, settings: list[str]) -> None:
    """The job, on one rank."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = make_step("cnn")
    for _ in range(WARM_UP_STEPS):
        step()
    switches = Switches()
    means: Turns = {setting: [] for setting in settings}
    order, rng = list(settings), random.Random(0)  # all ranks take the same turns
    rank = dist.get_rank()
    for number in range(rounds):
        rng.shuffle(order)
        for setting in order:
            switches.set(SETTINGS[setting])
            for _ in range(SETTLING_STEPS):
                step()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            of_turn = time.perf_counter() - start, time.process_time() - busy
            means[setting].append((of_turn[0] / steps, of_turn[1] / steps))
        if rank == 0:
            print(f"\rround {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    switches.set(EVERYTHING)
    of_all: list[Turns] = [{}] * NUM_RANKS
    dist.all_gather_object(of_all, means)
    dist.destroy_process_group()
    if rank == 0:
        report(of_all)


def report(of_all: list[Turns]) -> None:
    """Prints the table."""
    off, off_busy = steps_of(of_all, "nothing")
    print(
        f"\n\nmean step, {len(off)} rounds; ratio to the same round with nothing on; 95 % interval"
    )
    print(f"{'on':<16} {'ms':>7}   {'ratio':<28} processor time")
    for setting in of_all[0]:
        own, busy = steps_of(of_all, setting)
        print(
            f"{setting:<16} {statistics.median(own) * 1e3:7.2f}   "
            f"{ratio(own, off):<28} {ratio(busy, off_busy)}"
        )


def steps_of(of_all: list[Turns], setting: str) -> tuple[list[float], list[float]]:
    """Of each turn of a setting: rank 0's mean step, and the processor time of all ranks."""
    turns = list(zip(*(of_rank[setting] for of_rank in of_all), strict=True))
    return [turn[0][0] for turn in turns], [sum(busy for _, busy in turn) for turn in turns]


def ratio(own: list[float], plain: list[float]) -> str:
    """The ratio of the ones to the others of the same rounds."""
    return str(interval([value / off for value, off in zip(own, plain, strict=True)]))


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=8, help="of each setting in a round")
    parser.add_argument(
        "--only",
        action="append",
        choices=[name for name in SETTINGS if SETTINGS[name]],
        help="may be repeated; default: all settings",
    )
    parser.add_argument("--level", choices=("comm", "layer"), default="layer")
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        settings = list(SETTINGS) if options.only is None else ["nothing", *options.only]
        work(options.rounds, options.steps, settings)
        return
    arguments = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    for setting in options.only or []:
        arguments += ["--only", setting]
    sys.exit(run_traced(__file__, arguments, level=options.level))


if __name__ == "__main__":
    main()
