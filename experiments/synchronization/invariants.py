"""Checks that a run satisfied the invariants of its rule, from the marks of its processes alone.

Nothing is taken from the code that decides: what servers applied and answered is replayed in the
order of their marks, and compared with what workers pushed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.marks import Mark
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.synchronization.ssp import AdaptiveSsp, Ssp

Marks = Mapping[int, Sequence[Mark]]
"""Marks by the global rank of the process, in its own order."""


def check_servers(
    rule: ServerRule, workers: Sequence[int], servers: Marks, steps: Marks
) -> list[str]:
    """Checks a run with servers.

    The spread of clocks never passes the bound; a read holds every update that the rule
    promises; no update is lost or applied twice.

    Args:
        workers: Global ranks of the workers, in the order of `held`.
        steps: The marks of each worker.

    Returns:
        One sentence for each violation.
    """
    found: list[str] = []
    for server, marks in servers.items():
        found += _ServerReplay(rule, workers, server).run(marks)
    for worker in workers:
        pushed = [mark.clock for mark in steps.get(worker, ()) if mark.what == "step"]
        found += _compare_pushes(worker, pushed, servers)
    return found


class _ServerReplay:
    """One server's marks, replayed."""

    def __init__(self, rule: ServerRule, workers: Sequence[int], server: int) -> None:
        self._rule = rule
        self._workers = list(workers)
        self._name = f"server {server}"
        self._active = set(workers)
        self._applied = dict.fromkeys(workers, 0)
        self._seen: set[tuple[int, int]] = set()
        self._rounds: Counter[int] = Counter()
        self._updates: dict[int, list[Mark]] = {}
        self._found: list[str] = []

    def run(self, marks: Iterable[Mark]) -> list[str]:
        """The violations."""
        for mark in marks:
            if mark.what in ("apply", "drop"):
                self._push(mark)
            elif mark.what == "read":
                self._read(mark)
            elif mark.what == "leave":
                self._active.discard(mark.worker)
        if self._rule.by_rounds:
            self._check_rounds()
        return self._found

    def _push(self, mark: Mark) -> None:
        key = (mark.worker, mark.clock)
        which = f"update {mark.clock} of worker {mark.worker}"
        if key in self._seen:
            self._say(f"{which} was applied or dropped twice")
        self._seen.add(key)
        if mark.what == "drop":
            if not self._rule.by_rounds:
                self._say(f"{which} was dropped")
            elif mark.clock >= len(self._rounds):
                self._say(f"{which} was dropped before its round was complete")
            return
        if self._rule.by_rounds:
            self._rounds[mark.clock] += 1
            self._updates.setdefault(mark.one("update") or 0, []).append(mark)
        elif mark.clock != self._applied[mark.worker]:
            self._say(f"{which} was applied after {self._applied[mark.worker]} others of it")
        self._applied[mark.worker] += 1

    def _read(self, mark: Mark) -> None:
        held = mark.numbers.get("held", ())
        bound = mark.one("bound")
        which = f"the read of step {mark.clock} by worker {mark.worker}"
        if self._rule.by_rounds:
            if held != (len(self._rounds),) * len(self._workers) or mark.clock > len(self._rounds):
                self._say(f"{which} says that it holds {held}, after {len(self._rounds)} rounds")
            return
        if held != tuple(self._applied[worker] for worker in self._workers):
            self._say(f"{which} says that it holds {held}, which is not what was applied")
        slowest = min((self._applied[worker] for worker in self._active), default=mark.clock)
        if bound is not None and mark.clock - slowest > bound:
            self._say(f"{which} was answered {mark.clock - slowest} steps ahead, bound {bound}")
        if not self._is_allowed(bound):
            self._say(f"{which} was answered by the bound {bound}, which is not the rule's")

    def _is_allowed(self, bound: int | None) -> bool:
        rule = self._rule
        if isinstance(rule, AdaptiveSsp):
            return bound is not None and rule.lowest <= bound <= rule.highest
        return bound == (rule.bound if isinstance(rule, Ssp) else None)

    def _check_rounds(self) -> None:
        if sorted(self._rounds) != list(range(len(self._rounds))):
            self._say(f"the rounds {sorted(self._rounds)[:5]} ... do not follow each other")
        for update, marks in self._updates.items():
            if len({mark.clock for mark in marks}) > 1:
                self._say(f"update {update} is the mean of pushes of different steps")
        if len(self._updates) != len(self._rounds):
            self._say(f"{len(self._rounds)} rounds were applied as {len(self._updates)} updates")

    def _say(self, text: str) -> None:
        self._found.append(f"{self._name}: {text}")


def _compare_pushes(worker: int, pushed: Sequence[int], servers: Marks) -> list[str]:
    """Compares what a worker pushed with what each server got."""
    found = []
    for server, marks in servers.items():
        own = [mark for mark in marks if mark.worker == worker]
        got = Counter(mark.clock for mark in own if mark.what in ("apply", "drop"))
        if any(mark.what == "leave" and mark.texts.get("how") == "died" for mark in own):
            continue  # the last marks of a process that was killed are lost
        lost = sorted(set(pushed) - set(got))
        if lost:
            found.append(f"server {server}: update {lost[0]} of worker {worker} was lost")
        extra = sorted(set(got) - set(pushed))
        if extra:
            found.append(f"server {server}: worker {worker} never pushed update {extra[0]}")
    if pushed and any(later <= earlier for earlier, later in itertools.pairwise(pushed)):
        found.append(f"worker {worker}: its clock went backwards")
    return found


def check_gossip(rule: Gossip, ranks: Marks) -> list[str]:
    """Checks D-PSGD: every rank averages in each step, once, and with its neighbours of that step.

    Args:
        ranks: The marks of each rank; ranks are 0, 1, ...
    """
    found = []
    clocks = {rank: [m for m in marks if m.what == "mix"] for rank, marks in ranks.items()}
    for rank, mixes in clocks.items():
        if [mix.clock for mix in mixes] != list(range(len(mixes))):
            found.append(f"rank {rank}: the steps of its averages do not follow each other")
        for mix in mixes:
            expected = rule.neighbours(rank, len(ranks))
            if mix.numbers.get("peers", ()) != expected:
                found.append(f"rank {rank}: it averaged step {mix.clock} with other ranks")
            if any(n in clocks and len(clocks[n]) < mix.clock for n in expected):
                found.append(f"rank {rank}: a neighbour never reached step {mix.clock}")
    return found


def check_pairs(ranks: Marks) -> list[str]:
    """Checks AD-PSGD: each mean of two ranks is one on both of them, exactly once."""
    pairs: Counter[tuple[int, int, int, int]] = Counter()
    for marks in ranks.values():
        for mark in marks:
            if mark.what != "average":
                continue
            peer, peer_clock = mark.one("peer") or 0, mark.one("peer_clock") or 0
            (a, c), (b, d) = sorted([(mark.worker, mark.clock), (peer, peer_clock)])
            pairs[a, c, b, d] += 1
    return [
        f"ranks {a} and {b}: the mean of steps {c} and {d} is on {count} of both ranks"
        for (a, c, b, d), count in pairs.items()
        if count != 2
    ]


def check_groups(rule: Grouped, ranks: Marks) -> list[str]:
    """Checks grouped synchronization: which ranks averaged after which steps."""
    found = []
    lengths = set()
    for rank, marks in ranks.items():
        steps = [mark.clock for mark in marks if mark.what == "group"]
        everywhere = [mark.clock for mark in marks if mark.what == "all"]
        lengths.add(len(steps))
        if steps != list(range(len(steps))):
            found.append(f"rank {rank}: the steps of its group do not follow each other")
        if everywhere != [step for step in steps if rule.averages_after(step)]:
            found.append(f"rank {rank}: all ranks averaged after other steps than the rule's")
    if len(lengths) > 1:
        found.append(f"the ranks made different numbers of steps: {sorted(lengths)}")
    return found
