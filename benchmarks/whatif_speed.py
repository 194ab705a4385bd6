"""How long ``ddltrace whatif`` replays a step of many ranks, and how that grows.

    python benchmarks/whatif_speed.py                  1,024 ranks x 500 messages, and half of each
    python benchmarks/whatif_speed.py --ranks 8 --messages 10 --steps 3     a dry run

A program is made in memory: in each step, every rank works before each of its messages, launches
it, and waits for all at the end. Work differs between ranks and steps. Besides: one all_reduce
message by message along a ring of 64 ranks, as `--architecture` plans are replayed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ddltrace.analyzer.whatif.program import LAUNCH, STEP_END, WAIT, Exchange, Items, Program
from ddltrace.analyzer.whatif.replay import Replay


def made(ranks: int, messages: int, steps: int) -> Program:
    """A program of data-parallel steps."""
    random = np.random.default_rng(0)
    number = np.arange(messages * steps).reshape(steps, messages)
    kind = np.tile(np.repeat([LAUNCH, WAIT, STEP_END], [messages, messages, 1]), steps)
    exchange = np.concatenate([np.concatenate([row, row, [-1]]) for row in number])
    step = np.repeat(np.arange(steps), 2 * messages + 1)
    nothing = np.zeros(len(kind), dtype=np.int64)
    items = []
    for _ in range(ranks):
        work = np.where(kind == LAUNCH, random.uniform(50e3, 150e3, len(kind)), 0.0)
        items.append(Items(kind, exchange, work, nothing * 1.0, nothing, nothing, step))
    places = np.arange(ranks)
    exchanges = [
        Exchange("all_reduce", "0", 0, places, 1 << 20, np.full(ranks, 90e3), None, 1, int(each))
        for each in np.repeat(np.arange(steps), messages)
    ]
    return Program(
        ranks=places.tolist(),
        hosts=["host"] * ranks,
        steps=np.arange(steps),
        items=items,
        exchanges=exchanges,
        in_flight={0: 2},
        begin=np.zeros(ranks),
        recorded=np.zeros((steps, ranks)),
    )


def by_message(ranks: int) -> Program:
    """One all_reduce along a ring, each of its sends an exchange of two ranks."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    exchanges = []
    for _ in range(2 * (ranks - 1)):
        first = len(exchanges)
        for rank in range(ranks):
            pair = np.array(sorted((rank, (rank + 1) % ranks)))
            exchanges.append(
                Exchange(
                    "send", "0", -1 - len(exchanges), pair, 1 << 14, np.full(2, 9e3), None, 0, 0
                )
            )
        for rank in range(ranks):
            sent, received = first + rank, first + (rank - 1) % ranks
            rows[rank] += [(LAUNCH, sent), (LAUNCH, received), (WAIT, sent), (WAIT, received)]
    items = []
    for mine in rows:
        kind, exchange = (np.array(column) for column in zip(*mine, (STEP_END, -1), strict=True))
        nothing = np.zeros(len(kind), dtype=np.int64)
        items.append(Items(kind, exchange, nothing * 1.0, nothing * 1.0, nothing, nothing, nothing))
    return Program(
        ranks=list(range(ranks)),
        hosts=["host"] * ranks,
        steps=np.arange(1),
        items=items,
        exchanges=exchanges,
        in_flight={},
        begin=np.zeros(ranks),
        recorded=np.zeros((1, ranks)),
    )


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    ranks, messages, steps = options.ranks, options.messages, options.steps
    for shape in ((ranks, messages), (ranks // 2, messages), (ranks, messages // 2)):
        program = made(*shape, steps)
        begin = time.perf_counter()
        Replay(program).run()
        taken = (time.perf_counter() - begin) / steps
        print(f"{shape[0]:,} ranks x {shape[1]:,} messages: {taken:.3f} s a step")
    program = by_message(min(64, ranks))
    begin = time.perf_counter()
    Replay(program).run()
    count = len(program.exchanges)
    print(
        f"ring of {len(program.ranks)} ranks, {count:,} sends: {time.perf_counter() - begin:.3f} s"
    )


if __name__ == "__main__":
    main()
