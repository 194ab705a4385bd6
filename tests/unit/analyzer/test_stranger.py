"""A reader written from the two reference pages alone gets the report's numbers."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest
from support import stranger_reader
from support.sampling import choose_seed

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.run_info import GroupInfo

SAMPLES = Path(__file__).resolve().parents[3] / "sample_traces"


def compare(path: Path) -> dict[str, Any]:
    """Compares every number of the reader with the report's; returns the report."""
    report = open_trace(path).analyze().to_json()
    trace = stranger_reader.Trace(path)
    assert_same(trace.summary(), report["summary"])
    for mine, its in zip(trace.rank_rows(), report["ranks"], strict=True):
        assert_same(mine, its)
    for mine, its in zip(trace.step_rows(), report["steps"], strict=True):
        assert_same(mine, its)
    assert_same(trace.joining(), report["joining"])
    rows = trace.collective_rows()
    assert len(rows) == len(report["collectives"])
    for its in report["collectives"]:
        assert_same(rows[its["op"], its["group"], its["group_size"], its["bytes"]], its)
    late = trace.straggler_rows()
    assert set(late) == {its["rank"] for its in report["stragglers"]}
    for its in report["stragglers"]:
        assert_same(late[its["rank"]], its)
    links = trace.p2p_rows()
    for its in report["p2p"]:
        assert_same(links[its["src"], its["dst"]], its)
    return report


def assert_same(mine: Any, its: Any) -> None:
    for name, value in mine.items():
        if isinstance(value, dict):
            assert_same(value, its[name])
        else:
            known = its[name] is not None
            assert value == (pytest.approx(its[name], rel=1e-9) if known else None), name


def test_the_reader_uses_nothing_of_ddltrace() -> None:
    tree = ast.parse(Path(stranger_reader.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    standard = {"__future__", "collections", "json", "pathlib", "statistics", "typing"}
    assert imported == {*standard, "pyarrow"}


@pytest.mark.parametrize("name", ["straggler", "ddp-4-hosts-400mbit"])
def test_the_sample_traces(name: str) -> None:
    report = compare(SAMPLES / name)
    assert report["summary"]["overlap_ratio"] > 0
    assert report["stragglers"]


@pytest.mark.parametrize("number", range(6))
def test_random_jobs(build, number: int) -> None:
    seed = choose_seed() + number
    print(f"seed {seed}")
    job = RandomJob(build, random.Random(seed), device=number % 2 == 0)
    for step in range(job.rng.randint(1, 14)):
        job.train(step)
    compare(job.trace.write())


class RandomJob:
    """Ranks that work at random times, also at impossible ones, and lose messages."""

    def __init__(self, build: Any, rng: random.Random, *, device: bool) -> None:
        self.rng = rng
        self.device = device
        size = rng.choice([2, 3, 5])
        pair = tuple(sorted(rng.sample(range(size), 2)))
        self.members = {"0": tuple(range(size)), "1": pair}
        self.seq = dict.fromkeys(self.members, 0)
        self.trace = build(size)
        backend = "nccl" if device else "gloo"
        self.trace.groups = [
            GroupInfo(name, "group", backend, ranks) for name, ranks in self.members.items()
        ]
        for rank in range(size):
            self.trace[rank].info_changes["device"] = "cuda" if device else "cpu"

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def train(self, step: int) -> None:
        self.begin = 1000.0 * step
        for rank in self.members["0"]:
            self.trace[rank].step = step
            self.work(step, self.trace[rank], self.begin)
        for _ in range(self.rng.randint(1, 4)):
            self.collective(self.rng.choice(["0", "1"]))
        if self.rng.random() < 0.6:
            self.send(step, *self.rng.sample(self.members["1"], 2))

    def work(self, step: int, rank: Any, begin: float) -> None:
        start, end = begin + self.between(0, 40), begin + self.between(900, 990)
        rank.whole_step(step, start, end + (300 if self.rng.random() < 0.1 else 0))
        rank.add("data", start, start + self.between(1, 60), name="data")
        middle = begin + self.between(200, 500)
        rank.add("phase", begin + 50, middle, name="forward", phase="forward")
        rank.add("phase", middle, begin + 700, name="backward", phase="backward")
        rank.add("phase", begin + 750, begin + 850, name="optimizer", phase="optimizer")
        rank.add("layer", begin + self.between(50, 99), begin + 150, name="layer")
        lane = self.rng.choice(["main", "thread-1"])
        rank.add("codec", begin + 300, begin + 320, name="encode", lane=lane)
        rank.wait(begin + 620, begin + 700, None, name="backward")
        rank.wait(begin + 400, begin + self.between(401, 460), 0)
        if self.device:
            for number in range(8):
                at = begin + self.between(0, 900)
                lane = f"stream-{number % 3}"
                rank.add("kernel", at, at + self.between(1, 90), name="kernel", lane=lane)
            copied = begin + self.between(101, 300)
            rank.add("copy", begin + 100, copied, name="Memcpy HtoD", lane="stream-0")

    def message(self, rank: int, op: str, at: float, end: float | None, **columns: Any) -> None:
        builder = self.trace[rank]
        builder.message(op, at, end, enqueue_ns=round(1000 * (at - self.between(0, 30))), **columns)
        if end is not None and self.rng.random() < 0.2:  # it was seen in flight before
            builder.rows.insert(-1, {**builder.rows[-1], "end_ns": None, "status": "open"})

    def collective(self, group: str) -> None:
        rooted = self.rng.random() < 0.6
        op = self.rng.choice(["broadcast", "reduce", "scatter", "gather"])
        op = op if rooted else self.rng.choice(["all_reduce", "all_gather"])
        members = self.members[group]
        at, size = self.begin + self.between(100, 600), self.rng.choice([4, 4096, 1 << 20])
        done = at + self.between(20, 200)
        fate = self.rng.choice(["lost", "open", "unequal", *["complete"] * 17])
        root = self.rng.choice(members) if rooted else None
        lane = "stream-9" if self.device and self.rng.random() < 0.8 else f"comm/{group}"
        for rank in members[:-1] if fate == "lost" else members:
            left = rooted and self.rng.random() < 0.4  # before the last one came
            end = at + self.between(1, 30) if left else done + self.between(0, 30)
            own = size * (2 if fate == "unequal" and rank == members[0] else 1)
            self.message(
                rank,
                op,
                min(at + self.between(0, 60), end),
                None if fate == "open" else end,
                group=group,
                seq=self.seq[group],
                bytes=own,
                out_bytes=own * len(members) if "gather" in op else own,
                peer=root,
                lane=lane,
            )
        self.seq[group] += 1

    def send(self, step: int, source: int, target: int) -> None:
        lane = "stream-9" if self.device else "comm/0"
        at = self.begin + self.between(100, 500)
        for rank, op, peer in ((source, "send", target), (target, "recv", source)):
            begun = at + self.between(0, 80)
            columns = {"bytes": 100} if op == "send" else {"out_bytes": 100}
            columns |= {"tag": 0, "seq": step, "peer": peer}
            self.message(rank, op, begun, begun + self.between(1, 120), lane=lane, **columns)
