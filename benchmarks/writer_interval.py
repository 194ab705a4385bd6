"""Measures what writing a batch at an interval costs a job.

Inside one job the writer of every rank switches between two intervals in turns, so that both see
the same machine. For each turn the script takes the processor time of the writer's thread, the
processor time of the whole process, and the mean step::

    python benchmarks/writer_interval.py
    python benchmarks/writer_interval.py --interval 0.8 --interval 0.2

The job is the residual CNN of `overhead.py` under DistributedDataParallel, two ranks over Gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from overhead import NUM_RANKS, make_step, run_traced

WARM_UP_STEPS = 30
INTERVALS_S = (0.8, 0.2)
STEPS_BETWEEN_QUESTIONS = 5


def turn(step: Any, writer: Any, seconds: float) -> tuple[float, float, float]:
    """One turn: the writer's ms per second, the process's ms per step, and the step in ms."""
    import torch
    import torch.distributed as dist

    goes_on = torch.ones(1)
    start, busy, process = time.perf_counter(), writer.busy_ns, time.process_time()
    steps = 0
    while goes_on[0]:
        for _ in range(STEPS_BETWEEN_QUESTIONS):
            step()
        steps += STEPS_BETWEEN_QUESTIONS
        goes_on[0] = float(time.perf_counter() - start < seconds)
        dist.broadcast(goes_on, 0)  # all ranks take the same turns
    took = time.perf_counter() - start
    return (
        (writer.busy_ns - busy) / 1e6 / took,
        (time.process_time() - process) / steps * 1e3,
        took / steps * 1e3,
    )


def work(rounds: int, turn_s: float, intervals_s: list[float]) -> None:
    """The job, on one rank."""
    import torch
    import torch.distributed as dist

    from ddltrace.tracer.capture.session import current_session

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = make_step("cnn")
    for _ in range(WARM_UP_STEPS):
        step()
    session: Any = current_session()
    writer = session._writer
    turns: dict[float, list[tuple[float, float, float]]] = {each: [] for each in intervals_s}
    for number in range(rounds):
        for interval_s in intervals_s[:: 1 if number % 2 else -1]:
            writer._interval_s = interval_s
            turn(
                step, writer, 2 * max(intervals_s)
            )  # what the other interval left is not this one's
            turns[interval_s].append(turn(step, writer, turn_s))
    of_all: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(of_all, turns)
    if dist.get_rank() == 0:
        print(f"{'interval, s':>12} {'writer, ms/s':>14} {'process, ms/step':>18} {'step, ms':>10}")
        for interval_s in intervals_s:
            cells = [
                statistics.median(one[i] for of_rank in of_all for one in of_rank[interval_s])
                for i in range(3)
            ]
            print(f"{interval_s:12g} {cells[0]:14.2f} {cells[1]:18.2f} {cells[2]:10.2f}")
    dist.destroy_process_group()


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn-s", type=float, default=6.0)
    parser.add_argument("--interval", type=float, action="append", help="seconds; may be repeated")
    parser.add_argument("--rank-of", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    intervals = options.interval or list(INTERVALS_S)
    if options.rank_of:
        work(options.rounds, options.turn_s, intervals)
        return
    arguments = ["--rounds", str(options.rounds), "--turn-s", str(options.turn_s)]
    for interval_s in intervals:
        arguments += ["--interval", str(interval_s)]
    sys.exit(run_traced(__file__, arguments))


if __name__ == "__main__":
    main()
