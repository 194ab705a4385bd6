"""Small programs of several ranks whose run is computed here, without any of the analyzer's code.

A program is a list of operations per rank. `run` plays it: work takes its time, a collective is
complete a transfer after the last of the ranks that it needs has come (in Gloo's broadcast, scatter
and gather not all ranks need each other), a receive a transfer after the later of the send and
itself. `write` makes a trace of what was played. To know what something costs, take it
out of the program and run it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Op:
    """One operation of a rank.

    Attributes:
        do: ``work``, ``collective``, ``launch``, ``wait``, ``send``, ``recv`` or ``step``.
        name: For work, its layer; for messages, the key that all sides share.
        activity: For work: ``compute``, ``data``, ``update`` or ``host``.
        us: Duration of work, or of a message's transfer.
        peer: The other side of a send or receive.
        ranks: The ranks of a collective.
        bytes: The bytes of a message.
        collective: The operation of a collective.
        root: The root of a broadcast, scatter, gather or reduce.
        extra: For work: the part of `us` that is a removable cause of delay.
        cause: The name of that cause.
    """

    do: str
    name: str = ""
    activity: str = ""
    us: int = 0
    peer: int = -1
    ranks: tuple[int, ...] = ()
    bytes: int = 4
    collective: str = "all_reduce"
    root: int = -1
    extra: int = 0
    cause: str = ""


Program = list[list[Op]]


@dataclass
class Played:
    """What a run did: (rank, kind, start, end, op), times in us."""

    rows: list[tuple[int, str, int, int, Op]] = field(default_factory=list)
    step_end: dict[int, list[int]] = field(default_factory=dict)

    def end(self) -> int:
        """When the last rank ends."""
        return max(ends[-1] for ends in self.step_end.values())

    def end_of(self, step: int) -> int:
        """When the last rank ends a step."""
        return max(ends[step] for ends in self.step_end.values())


def run(program: Program) -> Played:
    """Plays a program."""
    ranks = len(program)
    now, at = [0] * ranks, [0] * ranks
    came: dict[tuple[str, int], int] = {}
    began = [0] * ranks
    played = Played(step_end={rank: [] for rank in range(ranks)})

    pending: list[tuple[int, int, Op]] = []
    while any(at[rank] < len(program[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            while at[rank] < len(program[rank]):
                op = program[rank][at[rank]]
                if op.do == "work":
                    played.rows.append((rank, op.activity, now[rank], now[rank] + op.us, op))
                    now[rank] += op.us
                elif op.do == "step":
                    played.rows.append((rank, "step", began[rank], now[rank], op))
                    played.step_end[rank].append(now[rank])
                    began[rank] = now[rank]
                elif op.do in ("send", "launch"):
                    came[op.name, rank] = now[rank]
                    pending.append((rank, now[rank], op))
                else:  # collective, recv, wait
                    if op.do != "wait":
                        came.setdefault((op.name, rank), now[rank])
                    done = _complete(op, rank, came)
                    if done is None:
                        break
                    end = max(done, now[rank])
                    if op.do != "wait":
                        played.rows.append((rank, "message", now[rank], end, op))
                    played.rows.append((rank, "wait", now[rank], end, op))
                    now[rank] = end
                at[rank] += 1
                moved = True
        assert moved, "the program hangs"
    for rank, start, op in pending:
        done = start if op.do == "send" else _complete(op, rank, came)
        assert done is not None
        played.rows.append((rank, "message", start, done, op))
    return played


def _complete(op: Op, rank: int, came: dict[tuple[str, int], int]) -> int | None:
    """When a message is complete; None while one of its sides has not come."""
    sides = (rank, op.peer) if op.do in ("send", "recv") else _needed(op, rank)
    times = [came.get((op.name, side)) for side in sides]
    if any(time is None for time in times):
        return None
    return max(time for time in times if time is not None) + op.us


def _needed(op: Op, rank: int) -> tuple[int, ...]:
    """The ranks that must come before Gloo completes a collective on a rank."""
    if op.collective in ("scatter", "gather"):
        return op.ranks if rank == op.root else (rank, op.root)
    if op.collective != "broadcast":
        return op.ranks
    size = len(op.ranks)
    place = (op.ranks.index(rank) - op.ranks.index(op.root)) % size
    # Child c of place p adds a higher bit than all of p's.
    children = [place + (1 << bit) for bit in range(place.bit_length(), size.bit_length())]
    above = [place & ((1 << bit) - 1) for bit in range(place.bit_length())]
    first = op.ranks.index(op.root)
    places = {place, *(child for child in children if child < size), *above}
    return tuple(op.ranks[(each + first) % size] for each in places)


_PHASE = {"compute": "forward", "update": "optimizer"}


def write(built: Any, played: Played) -> None:
    """Puts what was played into a `TraceBuilder`."""
    ends = played.step_end
    numbers: dict[tuple[str, int], int] = {}
    groups: dict[tuple[int, ...], str] = {tuple(range(len(ends))): "0"}
    order: dict[tuple[str, str], int] = {}
    for rank, kind, start, end, op in sorted(played.rows, key=lambda row: (row[2], row[3])):
        one = built[rank]
        one.step = sum(1 for at in ends[rank] if at <= start)
        if kind == "message" and op.do in ("send", "recv"):
            pair = (rank, op.peer) if op.do == "send" else (op.peer, rank)
            seq = order.setdefault((op.name, "p2p"), sum(1 for k in order if k[1] == str(pair)))
            order.setdefault((op.name, str(pair)), seq)
            size = {"bytes": op.bytes} if op.do == "send" else {"out_bytes": op.bytes}
            numbers[op.name, rank] = one.message(
                op.do, start, end, peer=op.peer, tag=0, seq=seq, **size
            )
        elif kind == "message":
            group = groups.setdefault(op.ranks, str(len(groups)))
            seq = order.setdefault((op.name, "all"), sum(1 for k in order if k[1] == group))
            order.setdefault((op.name, group), seq)
            size = {"bytes": op.bytes, "out_bytes": op.bytes}
            peer = {"peer": op.root} if op.root >= 0 else {}
            numbers[op.name, rank] = one.message(
                op.collective, start, end, group=group, seq=seq, **size, **peer
            )
    for rank, kind, start, end, op in sorted(played.rows, key=lambda row: (row[3], -row[2])):
        one = built[rank]
        one.step = sum(1 for at in ends[rank] if at <= start)
        if kind in _PHASE:
            one.add("phase", start, end, name=_PHASE[kind], phase=_PHASE[kind])
            if kind == "compute":
                one.add("layer", start, end, name=op.name)
        elif kind == "data":
            one.add("data", start, end, name="next batch")
        elif kind == "wait":
            one.wait(start, end, numbers[op.name, rank])
        elif kind == "step":
            one.whole_step(ends[rank].index(end), start, end)


def without(program: Program, taken_out: Callable[[int, Op], Op]) -> Program:
    """The program with every operation replaced."""
    return [[taken_out(rank, op) for op in ops] for rank, ops in enumerate(program)]


def without_cause(program: Program, cause: str) -> Program:
    """The program without the extra time of a cause."""
    return without(
        program,
        lambda _, op: replace(op, us=op.us - op.extra, extra=0) if op.cause == cause else op,
    )


def data_parallel(
    seed: int, *, ranks: int, steps: int, late: dict[tuple[int, str], int], overlapped: bool
) -> Program:
    """Data-parallel training: data, forward, backward with buckets, update.

    Args:
        seed: Seed of all random choices.
        ranks: Number of ranks.
        steps: Number of steps.
        late: (rank, activity) -> how much longer that takes in every step, us.
        overlapped: Buckets are launched and waited for at the end, else one by one.
    """
    chance = random.Random(seed)
    base = {name: chance.randint(80, 600) for name in ("data", "forward", "backward", "update")}
    base["host"] = chance.randint(10, 60)
    transfer, buckets = chance.randint(20, 300), chance.randint(1, 4)
    everybody = tuple(range(ranks))
    program: Program = [[] for _ in everybody]
    for rank, ops in enumerate(program):
        own = random.Random(seed * 1000 + rank)

        def work(activity: str, part: str, name: str, *, first: bool = True) -> Op:
            extra = late.get((rank, activity), 0) if first else 0  # noqa: B023
            us = base[part] + own.randint(0, 3) + extra  # noqa: B023
            return Op("work", name, activity, us, extra=extra, cause=f"{rank} {activity}")  # noqa: B023

        for step in range(steps):
            ops.append(work("data", "data", "batch"))
            ops.append(work("compute", "forward", "net"))
            keys = [f"{step}.{bucket}" for bucket in range(buckets)]
            for key in keys:
                ops.append(work("compute", "backward", "net.back", first=False))
                do = "launch" if overlapped else "collective"
                ops.append(Op(do, key, us=transfer, ranks=everybody))
            if overlapped:
                ops += [Op("wait", key, us=transfer, ranks=everybody) for key in keys]
            ops.append(work("host", "host", "host"))
            ops.append(work("update", "update", "update"))
            ops.append(Op("step"))
    return program


ACTIVITIES = ("data", "forward", "backward", "host", "update")


def with_collective(
    seed: int, *, ranks: int, steps: int, op: str, root: int, late: tuple[int, str], extra: int
) -> Program:
    """Data-parallel training with an operation before each forward, as DDP's of buffers.

    Args:
        seed: Seed of all random choices.
        ranks: Number of ranks.
        steps: Number of steps.
        op: The operation.
        root: Its root.
        late: A rank, and one of `ACTIVITIES`: what takes longer there in every step.
        extra: By how much, us.
    """
    chance = random.Random(seed)
    base = {name: chance.randint(80, 600) for name in ACTIVITIES}
    first_us, reduce_us = chance.randint(20, 200), chance.randint(20, 300)
    everybody = tuple(range(ranks))
    rooted = op in ("broadcast", "scatter", "gather", "reduce")
    kinds = {"forward": "compute", "backward": "compute"}
    program: Program = [[] for _ in everybody]
    for rank, ops in enumerate(program):
        own = random.Random(seed * 1000 + rank)

        def work(part: str) -> Op:
            more = extra if (rank, part) == late else 0  # noqa: B023
            us = base[part] + own.randint(0, 3) + more  # noqa: B023
            return Op("work", part, kinds.get(part, part), us, extra=more, cause="fault")

        for step in range(steps):
            ops.append(work("data"))
            ops.append(
                Op(
                    "collective",
                    f"{step}.first",
                    us=first_us,
                    ranks=everybody,
                    collective=op,
                    root=root if rooted else -1,
                )
            )
            ops += [work("forward"), work("backward")]
            ops.append(Op("collective", f"{step}.reduce", us=reduce_us, ranks=everybody))
            ops += [work("host"), work("update"), Op("step")]
    return program


def pipeline(
    seed: int, *, stage_us: list[int], steps: int, microbatches: int, link_us: dict[int, int]
) -> Program:
    """GPipe: every stage runs all microbatches forward, then all backward.

    Args:
        seed: Seed of the jitter.
        stage_us: Forward time of one microbatch on each stage; backward takes the same.
        steps: Number of steps.
        microbatches: How many in a step.
        link_us: Stage -> transfer of what it sends on; 10 for others.
    """
    ranks = len(stage_us)
    program: Program = [[] for _ in range(ranks)]
    for rank, ops in enumerate(program):
        own = random.Random(seed * 1000 + rank)

        def work(name: str) -> Op:
            return Op("work", name, "compute", stage_us[rank] + own.randint(0, 2))  # noqa: B023

        for step in range(steps):
            for way, back in (("f", False), ("b", True)):
                source = rank + 1 if back else rank - 1
                target = rank - 1 if back else rank + 1
                for number in range(microbatches):
                    if 0 <= source < ranks:
                        link = link_us.get(min(source, rank), 10)
                        key = f"{step}{way}{number}:{source}"
                        ops.append(Op("recv", key, us=link, peer=source))
                    ops.append(work(f"stage{rank}.{way}"))
                    if 0 <= target < ranks:
                        link = link_us.get(min(target, rank), 10)
                        key = f"{step}{way}{number}:{rank}"
                        ops.append(Op("send", key, us=link, peer=target))
            ops.append(Op("work", "update", "update", 30))
            ops.append(Op("step"))
    return program


def ring(
    seed: int, *, ranks: int, steps: int, late: dict[int, int], link_us: dict[int, int]
) -> Program:
    """A hand-written ring: compute, then ranks - 1 rounds of send to the next, receive.

    Args:
        seed: Seed of the jitter.
        ranks: Number of ranks.
        steps: Number of steps.
        late: Rank -> how much longer it computes in every step, us.
        link_us: Rank -> transfer of what it sends; 20 for others.
    """
    program: Program = [[] for _ in range(ranks)]
    for rank, ops in enumerate(program):
        own = random.Random(seed * 1000 + rank)
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        for step in range(steps):
            extra = late.get(rank, 0)
            us = 300 + own.randint(0, 2) + extra
            ops.append(Op("work", "net", "compute", us, extra=extra, cause=f"{rank} compute"))
            for turn in range(ranks - 1):
                ops.append(
                    Op("send", f"{step}.{turn}:{rank}", us=link_us.get(rank, 20), peer=after)
                )
                ops.append(
                    Op("recv", f"{step}.{turn}:{before}", us=link_us.get(before, 20), peer=before)
                )
                ops.append(Op("work", "add", "compute", 5))
            ops.append(Op("work", "update", "update", 30))
            ops.append(Op("step"))
    return program
