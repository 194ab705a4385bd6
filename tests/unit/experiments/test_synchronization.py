"""The rules of synchronization: random schedules against the checker, and what the checker finds.

The schedules have no processes and no time but an injected clock: each worker's step takes a random
number of ticks, and events happen in the order of their ticks.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import replace

import pytest
from support.made_trace import trace_of

from ddltrace.analyzer.importers.imported import Row
from ddltrace.analyzer.open_trace import Trace
from ddltrace.experiments.harness.synchronization_report import (
    has_several_models,
    merged,
    synchronization_of,
)
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.bsp import Backup, Bsp
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.invariants import (
    check_gossip,
    check_groups,
    check_pairs,
    check_servers,
)
from ddltrace.experiments.synchronization.marks import Mark, mark_name, read_mark
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.synchronization.server_state import (
    Answer,
    Apply,
    Decision,
    Drop,
    ServerState,
)
from ddltrace.experiments.synchronization.ssp import AdaptiveSsp, Asp, Ssp
from ddltrace.tracer.errors import UsageError

SEED = random.SystemRandom().randrange(1 << 32)
SCHEDULES = 2000


def random_rule(rng: random.Random) -> ServerRule:
    return rng.choice(
        [
            Bsp(),
            Ssp(bound=rng.randrange(5)),
            Asp(),
            AdaptiveSsp(lowest=rng.randrange(3), highest=rng.randrange(3, 9), window=5),
            Backup(workers=rng.randrange(1, 4)),
        ]
    )


class Cluster:
    """Workers and servers under an injected clock; what a trace would hold of them."""

    def __init__(self, rng: random.Random, rule: ServerRule, *, with_deaths: bool) -> None:
        self.rng = rng
        self.rule = rule
        self.workers = rng.randrange(1, 6)
        servers = rng.randrange(1, 4)
        self.steps = rng.randrange(1, 15)
        self.states = [ServerState(rule, self.workers) for _ in range(servers)]
        self.marks: list[list[Mark]] = [[] for _ in range(servers)]
        self.steps_of: dict[int, list[Mark]] = {worker: [] for worker in range(self.workers)}
        self.updates = [0] * servers
        self.answers: dict[int, dict[int, int]] = {w: {} for w in range(self.workers)}
        self.clock = [0] * self.workers
        self.gone: set[int] = set()
        self.dead = {
            worker
            for worker in range(self.workers)
            if with_deaths and worker and rng.random() < 0.2
        }
        self.pace = [rng.choice([1, 1, 1, 3, 10]) for _ in range(self.workers)]
        self.events: list[tuple[int, int, str, int, int]] = []
        self.now = 0

    def later(self, what: str, worker: int, server: int = -1, ticks: int | None = None) -> None:
        if ticks is None:
            ticks = self.pace[worker] * self.rng.randrange(1, 6)
        self.order = getattr(self, "order", 0) + 1
        heapq.heappush(self.events, (self.now + ticks, self.order, what, worker, server))

    def run(self) -> None:
        for worker in range(self.workers):
            self.later("computed", worker)
        while self.events:
            self.now, _, what, worker, server = heapq.heappop(self.events)
            if what == "computed":
                self.computed(worker)
            elif what == "push":
                state = self.states[server]
                clock = self.clock[worker]
                self.note(server, state.push(worker, clock, float(self.pace[worker])))
                self.note(server, state.read(worker, clock + 1))
            else:
                how = "died" if worker in self.dead else "finished"
                self.marks[server].append(Mark("leave", worker, texts={"how": how}))
                self.note(server, self.states[server].leave(worker))

    def computed(self, worker: int) -> None:
        dies = worker in self.dead and self.rng.random() < 0.2
        if dies or self.clock[worker] >= self.steps:
            self.gone.add(worker)
            for server in range(len(self.states)):
                self.later("leave", worker, server, ticks=self.rng.randrange(3))
            return
        self.steps_of[worker].append(Mark("step", worker, self.clock[worker]))
        self.answers[worker] = {}
        for server in range(len(self.states)):
            self.later("push", worker, server, ticks=self.rng.randrange(3))

    def note(self, server: int, decisions: list[Decision]) -> None:
        for decision in decisions:
            marks = self.marks[server]
            if isinstance(decision, Apply):
                update = self.updates[server]
                marks += [Mark("apply", w, c, {"update": (update,)}) for w, c in decision.pushes]
                self.updates[server] += 1
            elif isinstance(decision, Drop):
                marks.append(Mark("drop", decision.worker, decision.clock))
            else:
                bound = () if decision.bound is None else (decision.bound,)
                numbers = {"held": decision.held, "bound": bound, "active": decision.active}
                marks.append(Mark("read", decision.worker, decision.clock, numbers))
                self.answered(server, decision)

    def answered(self, server: int, answer: Answer) -> None:
        got = self.answers[answer.worker]
        got[server] = answer.clock
        if len(got) == len(self.states):
            self.clock[answer.worker] = min(got.values())
            self.later("computed", answer.worker)

    def violations(self) -> list[str]:
        return check_servers(
            self.rule,
            range(self.workers),
            {100 + server: marks for server, marks in enumerate(self.marks)},
            self.steps_of,
        )


def test_no_random_schedule_breaks_a_promise_and_none_hangs() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for number in range(SCHEDULES):
        cluster = Cluster(rng, random_rule(rng), with_deaths=number % 2 == 0)
        cluster.run()
        assert not cluster.violations(), (SEED, number, cluster.rule, cluster.violations())
        # Nobody is left waiting: each worker has left, and the living have made all steps.
        assert cluster.gone == set(range(cluster.workers)), (SEED, number, cluster.rule)
        for worker in set(range(cluster.workers)) - cluster.dead:
            assert cluster.clock[worker] >= cluster.steps


def finished(rule: ServerRule, seed: int = 7) -> Cluster:
    """A schedule with enough of everything."""
    rng = random.Random(seed)
    while True:
        cluster = Cluster(rng, rule, with_deaths=False)
        if cluster.workers > 2 and cluster.steps > 5:
            cluster.run()
            return cluster


def index_of(cluster: Cluster, what: str) -> int:
    return max(i for i, mark in enumerate(cluster.marks[0]) if mark.what == what)


@pytest.mark.parametrize("rule", [Bsp(), Ssp(bound=1), Asp(), AdaptiveSsp(), Backup()], ids=str)
def test_a_lost_and_a_doubled_update_are_found(rule: ServerRule) -> None:
    cluster = finished(rule)
    at = index_of(cluster, "apply")
    applied = cluster.marks[0][at]
    cluster.marks[0].insert(at, applied)
    assert any("twice" in text for text in cluster.violations())
    del cluster.marks[0][at : at + 2]
    assert any("lost" in text for text in cluster.violations())


def test_a_read_ahead_of_the_bound_is_found() -> None:
    cluster = finished(Asp())
    cluster.rule = Ssp(bound=0)
    assert any("steps ahead" in text or "bound" in text for text in cluster.violations())


def test_a_read_that_holds_less_than_it_says_is_found() -> None:
    cluster = finished(Ssp(bound=2))
    at = index_of(cluster, "read")
    mark = cluster.marks[0][at]
    held = tuple(number + 1 for number in mark.numbers["held"])
    cluster.marks[0][at] = replace(mark, numbers={**mark.numbers, "held": held})
    assert any("not what was applied" in text for text in cluster.violations())


def test_the_adaptive_bound_is_the_lateness_of_the_slowest() -> None:
    rule = AdaptiveSsp(lowest=1, highest=30, window=20)
    even = [1.0] * 20
    assert rule.bound_for({0: even, 1: even}) == 1
    burst = [1.0] * 10 + [4.0] * 5 + [1.0] * 5
    assert rule.bound_for({0: even, 1: even, 2: burst}) == 15
    assert rule.bound_for({0: even, 1: even, 2: [1.5] * 20}) == 10
    assert replace(rule, highest=4).bound_for({0: even, 1: even, 2: burst}) == 4
    assert rule.bound_for({}) == rule.bound_for({0: []}) == 1


def test_marks_are_read_back() -> None:
    name = mark_name("read", worker=3, clock=12, held=(12, 11), bound=None, how="died")
    assert name == "sync read worker=3 clock=12 held=12,11 bound=- how=died"
    mark = read_mark(name, 5, 9)
    assert mark == Mark("read", 3, 12, {"held": (12, 11), "bound": ()}, {"how": "died"}, 5, 9)
    assert mark.one("bound") is None
    assert read_mark("forward") is None
    assert read_mark("sync") is read_mark("sync of files") is None


def test_partners_of_peers_are_symmetric() -> None:
    for ranks in range(2, 9):
        rings = {rank: Gossip().neighbours(rank, ranks) for rank in range(ranks)}
        assert all(rank in rings[other] for rank in rings for other in rings[rank])
        rule = AdPsgd()
        for rank in range(ranks):
            for partner in rule.partners(rank, ranks):
                assert rule.is_active(rank) != rule.is_active(partner)
                assert rank in rule.partners(partner, ranks)
        chosen = {rule.partner(0, ranks, clock) for clock in range(200)}
        assert chosen == set(rule.partners(0, ranks))


def mixes(steps: int, ranks: int) -> dict[int, list[Mark]]:
    rule = Gossip()
    return {
        rank: [
            Mark("mix", rank, clock, {"peers": rule.neighbours(rank, ranks)})
            for clock in range(steps)
        ]
        for rank in range(ranks)
    }


def test_a_missing_average_of_peers_is_found() -> None:
    ranks = mixes(5, 4)
    assert not check_gossip(Gossip(), ranks)
    del ranks[2][1]
    assert check_gossip(Gossip(), ranks)
    pairs = {
        0: [Mark("average", 0, 4, {"peer": (1,), "peer_clock": (2,)})],
        1: [Mark("average", 1, 2, {"peer": (0,), "peer_clock": (4,)})],
    }
    assert not check_pairs(pairs)
    assert check_pairs({**pairs, 1: []})
    rule = Grouped(size=2, every=2)
    groups = {
        rank: [Mark("group", rank, 0), Mark("group", rank, 1), Mark("all", rank, 1)]
        for rank in range(4)
    }
    assert not check_groups(rule, groups)
    assert check_groups(rule, {**groups, 3: groups[3][:2]})
    assert check_groups(rule, {**groups, 3: groups[3][1:]})


@pytest.mark.parametrize(
    ("spec", "valid"),
    [
        ("ring+ssp:bound=3", "ps:servers=1+ssp"),
        ("ps:sharded=true+backup:workers=1", "ps:servers=1"),
        ("ps+gossip", "leave out the architecture"),
        ("adpsgd+topk", "leave out the codec"),
        ("ps+asp+p3", "leave out the schedule"),
        ("gossip+localsgd", "leave out the schedule"),
        ("ps+asp+lars", "leave out the optimizer rule"),
        ("ps+ssp+dgc", "topk"),
        ("grouped+p3", "wfbp"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_what_would(spec: str, valid: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(spec)
    assert valid in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        "ps:servers=2+ssp:bound=3+zmq",
        "ps:servers=2+asp+topk:density=0.01+feedback",
        "ps+adaptive_ssp:highest=8",
        "ps:servers=3+backup:workers=2+qsgd",
        "grouped:size=2,every=4+ring",
        "ps:servers=2+bsp",
        "asp",
        "ring+bsp+wfbp",
    ],
)
def test_combinations_that_work_are_read(spec: str) -> None:
    assert parse(parse(spec).spec) == parse(spec)


@pytest.mark.parametrize(
    "spec", ["ps+ssp:bound=-1", "ps+backup:workers=0", "grouped:size=0", "ps+adaptive_ssp:lowest=9"]
)
def test_wrong_parameters_are_refused(spec: str) -> None:
    if "lowest" in spec:
        spec += ",highest=8"
    with pytest.raises(UsageError):
        parse(spec)


def test_a_trace_of_several_models_is_recognized() -> None:
    peer = Mark("rule")
    server = Mark("rule", numbers={"workers": (0, 1), "servers": (2,)})
    assert not has_several_models({0: [peer], 1: [peer]})
    assert not has_several_models({0: [], 1: [], 2: [server], 3: [server]})
    assert has_several_models({0: [peer, peer], 1: [peer, peer]})
    assert has_several_models({0: [], 1: [], 2: [server], 3: [server], 4: [server], 5: [server]})


def trace_of_cluster(cluster: Cluster, spec: str) -> Trace:
    """The trace that the cluster's processes would write: servers come after the workers."""
    workers = list(range(cluster.workers))
    rule = mark_name("rule", spec=spec, workers=workers, servers=len(cluster.marks))
    names = {
        worker: [mark_name("step", worker=worker, clock=m.clock) for m in cluster.steps_of[worker]]
        for worker in workers
    }
    for server, marks in enumerate(cluster.marks, cluster.workers):
        names[server] = [rule]
        for mark in marks:
            values = {**mark.numbers, **mark.texts}
            names[server].append(
                mark_name(mark.what, worker=mark.worker, clock=mark.clock, **values)
            )
    return trace_of(
        {
            rank: [Row(1000 + t, 1000 + t, "marker", name, "main") for t, name in enumerate(own)]
            for rank, own in names.items()
        }
    )


def staleness_by_replay(cluster: Cluster) -> Counter[int]:
    """Of each read, the largest over the servers of its distance to the slowest that still trains.

    Counted from updates and departures alone, in the order in which each server had them.
    """
    ages: dict[tuple[int, int], int] = {}
    for marks in cluster.marks:
        applied = Counter[int]()
        training = set(range(cluster.workers))
        for mark in marks:
            if mark.what == "apply":
                applied[mark.worker] += 1
            elif mark.what == "leave":
                training.discard(mark.worker)
            elif mark.what == "read":
                age = mark.clock - min(applied[worker] for worker in training)
                key = mark.worker, mark.clock
                ages[key] = max(0, age, ages.get(key, 0))
    return Counter(ages.values())


def test_staleness_counts_only_workers_that_still_train() -> None:
    rng = random.Random(SEED)
    differs = 0
    for number in range(100):
        cluster = Cluster(rng, Asp(), with_deaths=number % 4 != 0)
        cluster.run()
        found = synchronization_of(trace_of_cluster(cluster, "asp"))
        assert found is not None
        expected = staleness_by_replay(cluster)
        counts = found["staleness"]["counts"] if found["staleness"] else {}
        assert {int(age): count for age, count in counts.items()} == expected, (SEED, number)
        of_all = [
            max(0, mark.clock - min(mark.numbers["held"]))
            for mark in cluster.marks[0]
            if mark.what == "read"
        ]
        differs += Counter(of_all) != expected
    assert differs  # workers that have left were behind the reads of the others


def test_a_worker_that_died_at_its_first_step_makes_no_read_stale() -> None:
    cluster = finished(Asp())
    workers = tuple(range(cluster.workers))
    read = Mark("read", 0, 600, {"held": (600, 1, 598), "active": (0, 2), "bound": ()})
    cluster.workers, cluster.marks, cluster.steps_of = 3, [[read]], {w: [] for w in workers}
    found = synchronization_of(trace_of_cluster(cluster, "asp"))
    assert found is not None
    assert found["staleness"] == {"counts": {"2": 1}, "mean": 2.0, "max": 2}


def test_the_runs_of_a_rule_are_counted_together() -> None:
    runs = []
    for seed in (1, 2, 3):
        found = synchronization_of(trace_of_cluster(finished(Ssp(bound=3), seed), "ssp:bound=3"))
        assert found is not None
        runs.append(found)
    together = merged(runs)
    assert together is not None
    for key in ("updates", "clocks", "blocked_us_by_worker"):
        names = {name for run in runs for name in run[key]}
        assert together[key] == {name: sum(run[key].get(name, 0) for run in runs) for name in names}
    assert together["updates"]["pushed"] > 0
    ages = Counter[str]()
    for run in runs:
        ages.update(run["staleness"]["counts"])
    assert together["staleness"]["counts"] == dict(ages)
    assert together["bounds"]["min"] == min(run["bounds"]["min"] for run in runs)
