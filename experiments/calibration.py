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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.whatif.calibration import AT_ONCE, BUCKET, SCHEMA
from ddltrace.experiments.harness.job_process import last_lines, ranks_launcher, run_job
from ddltrace.experiments.messages.message_plan import Gradient, Message, Slice
from ddltrace.experiments.strategy.spec import exchange_of, parse
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    import torch

    from ddltrace.experiments.messages.message_exchange import MessageExchange

SIZES: Final = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of the vectors: 1 KiB to 16 MiB."""

_SHAPES: Final = ((32, 1, 1), (32, 8, 1), (32, 1, 48), (512, 1, 1))
"""Rows of the matrices that a message carries, how many lengths they have, and how many have each.

Matrices for codecs of low rank, square if there is one length. Several lengths differ by a `BUCKET`
for each rank: codecs treat parts of one length together, after they have rounded lengths up."""

_MERGED: Final = "mgwfbp:steps=1,alpha_us=1000000000,beta_us_per_mb=0"
"""A strategy that sends all gradients as they are in one message, as DDP does with few bytes."""

_WIDTH: Final = 64
_BATCH: Final = 4
"""Of the small GPT that computes in front of each timed exchange."""

_LAYERS: Final = 24
"""Of the model with which the engine's work for a gradient is timed; two gradients each."""

_FAST: Final = "10gbit"
"""Rate of an emulated network on which exchanges are timed."""

_WARMUP: Final = 2


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
        rounds: Timed rounds of each size.
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
        found: dict[str, Any] = {
            "exchanges": _exchanges(exchanges, rounds),
            "gradient_us": _gradient_us(rounds),
        }
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


def busy_clock() -> Callable[[], float]:
    """Returns a clock that measures how long processors are busy, us.

    Where ranks outnumber processors, it measures processor time: such ranks also wait for their
    turn, and in a loop of messages much longer than in a job, whose ranks compute meanwhile.
    """
    import torch.distributed as dist

    crowded = dist.get_world_size() / (os.cpu_count() or 1)
    if crowded <= 1:
        return lambda: time.perf_counter_ns() / 1e3
    return lambda: crowded * time.process_time_ns() / 1e3


def _exchanges(specs: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Times the engine's exchanges of a vector; leaves out those that refuse these ranks."""
    import torch
    import torch.distributed as dist

    from ddltrace.experiments.engine.create_exchange import create_message_exchange
    from ddltrace.experiments.workloads.gpt import CONTEXT, GptModel

    group = dist.group.WORLD
    assert group is not None
    model, codes = GptModel(_WIDTH), torch.zeros(_BATCH, CONTEXT, dtype=torch.int64)
    clock, found = busy_clock(), []
    for spec in specs:
        try:
            exchange = create_message_exchange(parse(spec), group)
        except DdltraceError:
            continue
        for rows, lengths, of_each in _SHAPES:
            gradients, messages = _messages(rows, lengths, of_each, dist.get_world_size())
            exchange.prepare(gradients)
            times: dict[int, list[float]] = {1: [], AT_ONCE: []}
            for number in range(_WARMUP + rounds):
                for count, taken in times.items():
                    # In a job, messages follow these, and find the caches full of their data.
                    model(codes).sum().backward()
                    us = busy_us(exchange, messages[:count], clock)
                    if number >= _WARMUP:
                        taken.append(us / count)
            found.append(
                {
                    "strategy": spec,
                    "ranks": dist.get_world_size(),
                    "elements": messages[0].elements,
                    "lengths": lengths,
                    "gradients": lengths * of_each,
                    "us": mean_of_medians(times[AT_ONCE]),
                    "alone_us": mean_of_medians(times[1]),
                }
            )
        exchange.close()
    return found


def busy_us(
    exchange: MessageExchange, messages: Sequence[Message], clock: Callable[[], float]
) -> float:
    """How long the engine takes to average messages of random elements. Collective.

    Args:
        exchange: Prepared for their gradients.
        messages: Of float32, all in flight at once.
        clock: From `busy_clock`.
    """
    import torch
    import torch.distributed as dist

    payloads = [torch.randn(message.elements) for message in messages]
    dist.barrier()
    begin = clock()
    exchange.begin_step()
    for handle in list(map(exchange.start, messages, payloads)):
        handle.wait()
    return clock() - begin


def mean_of_medians(times: Sequence[float]) -> float:
    """The mean over all ranks of the median of each rank's times. Collective."""
    import torch
    import torch.distributed as dist

    median = torch.tensor(statistics.median(times))
    dist.all_reduce(median)
    return median.item() / dist.get_world_size()


def _messages(
    rows: int, lengths: int, of_each: int, ranks: int
) -> tuple[dict[int, Gradient], list[Message]]:
    """Messages of some matrices each, as in `_SHAPES`."""
    gradients: dict[int, Gradient] = {}
    messages = []
    more = ranks * BUCKET // rows
    for number in range(AT_ONCE):
        slices = []
        for matrix in range(lengths * of_each):
            columns = rows if lengths == 1 else more * (matrix // of_each + 1)
            index, elements = len(gradients), rows * columns
            gradients[index] = Gradient(index, f"{index}", elements, shape=(rows, columns))
            slices.append(Slice(index, 0, elements))
        size = 4 * sum(each.elements for each in slices)
        messages.append(Message(number, tuple(slices), size))
    return gradients, messages


def _gradient_us(rounds: int) -> float:
    """How much longer a step takes for each gradient that the engine exchanges instead of DDP."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from ddltrace.experiments.engine.attach import attach

    inputs = torch.ones(4, 16)
    clock, medians = busy_clock(), []
    for engine in (False, True):
        model: nn.Module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(_LAYERS)))
        exchange = None
        if engine:
            exchange = attach(model, parse(_MERGED))
            model = exchange.model
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        times = []
        for number in range(_WARMUP + 4 * rounds):
            dist.barrier()
            begin = clock()
            model(inputs).sum().backward()
            optimizer.step()  # waits for the messages
            if number >= _WARMUP:
                times.append(clock() - begin)
        medians.append(statistics.median(times))
        if exchange is not None:
            exchange.close()
    return max(medians[1] - medians[0], 0.0) / (2 * _LAYERS)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
