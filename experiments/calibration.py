"""``ddltrace experiment calibrate``: measures what messages cost on the machines at hand.

Started on every rank as ``python -m ddltrace.experiments.calibration OUTPUT ROUNDS``, which times
all_reduces, and with ``STRATEGY...`` behind it the engine's own exchanges.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.whatif.calibration import AT_ONCE, BUCKET, SCHEMA
from ddltrace.experiments.harness.job_process import last_lines, ranks_launcher, run_job
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice, whole
from ddltrace.experiments.schedules.base import Dispatcher, InTurn, Schedule
from ddltrace.experiments.strategy.spec import exchange_of, parse
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ddltrace.experiments.strategy.strategy import Strategy

SIZES: Final = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of the vectors: 1 KiB to 16 MiB."""

_SHAPES: Final = ((32, 1, 1), (32, 8, 1), (32, 1, 48), (512, 1, 1))
"""Rows of the matrices that a message carries, how many lengths they have, and how many have each.

Matrices for codecs of low rank, square if there is one length. Several lengths differ by a `BUCKET`
for each rank: codecs treat parts of one length together, after they have rounded lengths up."""

_WIDTH: Final = 64
_BATCH: Final = 4
"""Of the small GPT that computes beside each timed exchange."""

_LEAST_US: Final = 1.0
"""The least time of an exchange: two measurements are subtracted from each other."""

_FAST: Final = "10gbit"
"""Rate of an emulated network on which exchanges are timed."""

_WARMUP: Final = 3


def calibrate(
    ranks: int,
    rounds: int,
    timeout_s: float,
    *,
    hosts: int | None,
    bandwidth: str | None,
    strategies: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures all_reduces of several sizes on all ranks, and on two of them; then exchanges.

    Args:
        ranks: Number of ranks.
        rounds: Timed rounds of each size and exchange.
        timeout_s: Seconds after which a measurement is ended.
        hosts: Hosts of an emulated network, one rank each; None for this machine's own.
        bandwidth: Rate of each of its links.
        strategies: Strategies whose exchanges of a vector are timed, on links so fast that their
            bytes count little. With NCCL, none.

    Returns:
        The calibration, as its file has it.

    Raises:
        DdltraceError: The ranks could not be started, or failed.
    """
    found = _measure(ranks_launcher(ranks, hosts, bandwidth), rounds, timeout_s, ())
    if strategies and found["library"] == "gloo":
        exchanges = list(dict.fromkeys(map(exchange_of, strategies)))
        fast = ranks_launcher(ranks, hosts, None if hosts is None else _FAST)
        found |= _measure(fast, rounds, timeout_s, exchanges)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "created": created, **found}


def _measure(
    start: Sequence[str], rounds: int, timeout_s: float, exchanges: Sequence[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ddltrace-calibration-") as folder:
        output, log = Path(folder) / "points.json", Path(folder) / "log"
        worker = ("-m", "ddltrace.experiments.calibration", str(output), str(rounds), *exchanges)
        # The engine is timed as jobs are: while they are recorded.
        record = ("ddltrace", "run", "-o", str(Path(folder) / "trace"), "--level", "layer", "--")
        command = [*((sys.executable, "-m", *record) if exchanges else ()), *start, *worker]
        end = run_job(command, log, timeout_s=timeout_s, environment={})
        if end.timed_out:
            raise DdltraceError(f"the calibration did not end within {timeout_s:g} s")
        if end.status != 0 or not output.exists():
            reason = f"exit status {end.status}: {last_lines(log)}"
            raise DdltraceError(f"the calibration failed, {reason}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _rank(output: Path, rounds: int, exchanges: Sequence[str]) -> None:
    """Measures on one rank; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    library = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if library == "nccl" else None
    if exchanges:
        torch.set_num_threads(1)  # as the ranks of a job
        dist.init_process_group("gloo")
        found: dict[str, Any] = {"exchanges": _exchanges(exchanges, rounds)}
    else:
        dist.init_process_group(library)
        found = {"library": library, "points": _all_reduces(device, rounds)}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _all_reduces(device: torch.device | None, rounds: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    points = []
    for ranks in sorted({2, dist.get_world_size()}):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            for size in SIZES:
                tensor = torch.ones(size // 4, device=device)
                times = []
                for number in range(_WARMUP + rounds):
                    dist.barrier(group)
                    begin = time.perf_counter_ns()
                    dist.all_reduce(tensor, group=group)
                    if device is not None:
                        torch.cuda.synchronize(device)
                    if number >= _WARMUP:
                        times.append((time.perf_counter_ns() - begin) / 1e3)
                points.append({"ranks": ranks, "bytes": size, "us": statistics.median(times)})
        dist.barrier()
    return points


def _ranks_per_processor() -> float:
    import torch.distributed as dist

    return dist.get_world_size() / (os.cpu_count() or 1)


def busy_us(step: Callable[[], object], rounds: int) -> float:
    """How long processors are busy with a step: the mean over ranks of each one's median.

    Where ranks outnumber processors, it is processor time: such ranks also wait for their turn, at
    each message of a loop much longer than in a job, whose ranks compute meanwhile. Collective.

    Args:
        step: Does it once. Its first calls are not timed.
        rounds: How many are.
    """
    import torch
    import torch.distributed as dist

    crowded, times = max(_ranks_per_processor(), 1.0), []
    clock = time.process_time_ns if crowded > 1 else time.perf_counter_ns
    for _ in range(_WARMUP + rounds):
        dist.barrier()
        begin = clock()
        step()
        times.append(clock() - begin)
    median = torch.tensor(crowded * statistics.median(times[_WARMUP:]) / 1e3)
    dist.all_reduce(median)
    return median.item() / dist.get_world_size()


def _exchanges(specs: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Times the engine's exchanges of a vector; leaves out those that refuse these ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    shaped = [(shape, count) for shape in _SHAPES for count in (1, AT_ONCE)]
    own = {each: busy_us(_training(_matrices(*each)), rounds) for each in shaped}
    found = []
    for spec in specs:
        strategy = parse(spec)
        try:
            taken = {each: _busy_with_us(strategy, *each, rounds) - own[each] for each in shaped}
        except DdltraceError:
            continue
        for shape in _SHAPES:
            sizes = _sizes(shape, ranks)
            found.append(
                {
                    "strategy": spec,
                    "ranks": ranks,
                    "elements": sum(rows * columns for rows, columns in sizes),
                    "lengths": shape[1],
                    "gradients": len(sizes),
                    "us": max(taken[shape, AT_ONCE], _LEAST_US) / AT_ONCE,
                    "alone_us": max(taken[shape, 1], _LEAST_US),
                }
            )
    return found


def _busy_with_us(
    strategy: Strategy, shape: tuple[int, int, int], messages: int, rounds: int
) -> float:
    """As `busy_us`, of a training step in which the strategy exchanges so many messages."""
    from ddltrace.experiments.engine.attach import attach
    from ddltrace.experiments.engine.groups import destroy_groups

    schedule = _EqualMessages(messages)
    exchange = attach(_matrices(shape, messages), replace(strategy, schedule=schedule))
    busy = busy_us(_training(exchange.model), rounds)
    exchange.close()
    del exchange
    destroy_groups()
    return busy


def _sizes(shape: tuple[int, int, int], ranks: int) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of a message, from a shape of `_SHAPES`."""
    rows, lengths, of_each = shape
    more = ranks * BUCKET // rows
    columns = [rows] if lengths == 1 else [more * (number + 1) for number in range(lengths)]
    return [(rows, each) for each in columns for _ in range(of_each)]


def _matrices(shape: tuple[int, int, int], messages: int) -> nn.Module:
    """A model whose parameters are the matrices of some messages, with random gradients."""
    import torch
    import torch.distributed as dist
    from torch import nn

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = _sizes(shape, dist.get_world_size())
            self.factors = [torch.randn(size) for size in sizes * messages]
            self.matrices = nn.ParameterList(torch.zeros_like(each) for each in self.factors)

        def forward(self) -> torch.Tensor:
            products = zip(self.matrices, self.factors, strict=True)
            return torch.stack([(matrix * factor).sum() for matrix, factor in products]).sum()

    return Matrices()


def _training(model: nn.Module) -> Callable[[], None]:
    """A training step of a model of `_matrices` beside a small GPT that exchanges nothing.

    Where ranks outnumber processors, messages are sent beside the backward pass of the GPT, as in
    a job. Else they are sent after it: the time that processors are busy with them is then the
    time until they have come.
    """
    import torch

    from ddltrace.experiments.workloads.gpt import CONTEXT, GptModel

    other, codes = GptModel(_WIDTH), torch.zeros(_BATCH, CONTEXT, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    crowded = _ranks_per_processor() > 1

    def step() -> None:
        optimizer.zero_grad()
        # The backward pass begins with what was computed last.
        if crowded:
            loss = other(codes).sum() + model()
        else:
            loss = model()
            loss = other(codes).sum() + loss
        loss.backward()
        optimizer.step()

    return step


class _EqualMessages(Schedule):
    """Sends a given number of messages, each with the same number of neighboring parameters."""

    def __init__(self, messages: int) -> None:
        self._messages = messages

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """Messages in the order in which their first gradients come."""
        parts: dict[int, list[Slice]] = {}
        for each in gradients:
            parts.setdefault(each.index * self._messages // len(gradients), []).append(whole(each))
        return MessagePlan(gradients, list(parts.values()))

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Each goes as soon as its gradients are ready."""
        return InTurn(plan)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
