"""A job that dies, goes on from a checkpoint, evaluates and saves: what its time goes to."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pyarrow.compute as pc
import pytest
from support.jobs import Done, at_once, on_ranks, run, torchrun, traced

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.schema import GARBAGE_COLLECTION


@pytest.mark.long
def test_time_of_a_job_that_restarts_from_a_checkpoint(tmp_path: Path) -> None:
    script, folders = "restarts_from_checkpoint.py", [tmp_path / "plain", tmp_path / "traced"]
    for folder in folders:
        folder.mkdir()
    command = torchrun(script, str(folders[1]))
    command.insert(command.index("--standalone"), "--max-restarts=1")

    def time_traced() -> tuple[Done, float]:
        begin = time.monotonic()
        done = run(traced(tmp_path / "trace", command), cwd=tmp_path)
        return done, time.monotonic() - begin

    plain, (done, seconds) = at_once(
        lambda: run(on_ranks(script, str(folders[0])), cwd=tmp_path), time_traced
    )
    assert (plain.status, done.status) == (0, 0), done.stderr
    assert len(plain.losses()) == 2 * 10
    # Without a restart, each step is executed once, and has the same losses.
    assert len(done.losses()) == 2 * (7 + 6)
    assert set(done.losses()) == set(plain.losses())
    trace = open_trace(tmp_path / "trace")
    assert [info.errors for info in trace.run.ranks] == [[]] * 4

    goodput = trace.analyze().goodput
    assert goodput is not None
    assert (goodput.restarts, goodput.lost_steps, goodput.whole_job) == (1, 3, True)
    assert goodput.wall_us < seconds * 1e6
    shares = asdict(goodput.shares)
    assert sum(shares.values()) == pytest.approx(1)
    took = {name: share * goodput.wall_us / 1e6 for name, share in shares.items()}
    assert took["hang"] == took["unrecorded"] == 0
    assert min(took["start"], took["restart"]) > 0.25
    assert 0 < took["training"] < seconds - 1.5
    # What the job has measured itself: all ranks at the same time, or one after the other.
    own = [json.loads(text) for text in re.findall(r"rank \d took (.*)", done.stdout)]
    for part, least in (("checkpoint", 0.3), ("evaluation", 0.4)):
        known = [each[part] for each in own]
        assert len(known) == 2
        assert least <= took[part] < sum(known) + 0.1, part

    markers = []
    for rank in trace.ranks:
        events = trace.events(rank)
        rows = events.filter(pc.equal(events["kind"], "marker")).to_pylist()
        names = [(row["name"].partition(" file=")[0], row["lane"] == "main") for row in rows]
        markers.append([each for each in names if each[0] != GARBAGE_COLLECTION])
    saves = [
        ("checkpoint load", True),
        ("checkpoint save", True),
        ("evaluation", True),
        ("checkpoint save async", True),
        ("checkpoint write", False),
        ("checkpoint save", True),
    ]
    for rank, names in enumerate(markers):
        assert sorted(names) == sorted([("checkpoint save", True)] * (rank == 0) + saves)
