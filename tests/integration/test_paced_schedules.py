"""The order of real ranks' messages, with paced layers and a paced link.

`benchmarks/paced_schedules.py` compares the times with those computed by hand; here only the
order counts, so that a busy machine changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs import on_ranks, run

JOB = Path(__file__).resolve().parents[2] / "benchmarks" / "paced_schedules.py"


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int]]]:
    output = tmp_path_factory.mktemp("paced") / "events.json"
    command = on_ranks(JOB, "--events", str(output), "--unit-ms", "4", "--steps", "1")
    done = run(command, cwd=output.parent, timeout=280)
    assert done.status == 0, done.stderr[-4000:]
    found: dict[str, list[Any]] = json.loads(output.read_text())
    # What is still under way from the step before comes ahead of the first gradient.
    return {
        name: [(what, gradient) for what, gradient, _ in step][_first_ready(step) :]
        for name, step in found.items()
    }


def _first_ready(step: list[Any]) -> int:
    return next(number for number, event in enumerate(step) if event[0] == "ready")


def test_every_message_starts_after_its_gradient_and_ends(
    events: dict[str, list[tuple[str, int]]],
) -> None:
    assert len(events) == 7
    for name, step in events.items():
        ready = {gradient: n for n, (what, gradient) in enumerate(step) if what == "ready"}
        starts = [(n, gradient) for n, (what, gradient) in enumerate(step) if what == "start"]
        assert all(n > ready[gradient] for n, gradient in starts), name
        assert len(starts) == sum(what == "end" for what, _ in step), name


def test_fifo_starts_after_backward_and_wait_free_during_it(
    events: dict[str, list[tuple[str, int]]],
) -> None:
    fifo = [what for what, _ in events["fifo two layers"]]
    assert fifo[:4] == ["ready", "ready", "start", "start"]
    wait_free = events["wfbp two layers"]
    assert wait_free[:4] == [("ready", 1), ("start", 1), ("ready", 0), ("start", 0)]
    large = [gradient for what, gradient in events["wfbp large output layer"] if what == "start"]
    assert large == [2, 1, 0]


@pytest.mark.parametrize("spec", ["tictac", "p3:slice=1000"])
def test_what_the_next_forward_needs_first_overtakes_what_has_not_started(
    events: dict[str, list[tuple[str, int]]], spec: str
) -> None:
    step = events[f"{spec} large output layer"]
    after = step[step.index(("ready", 0)) :]
    starts = [gradient for what, gradient in after if what == "start"]
    # What rank 0 had chosen before the input layer's gradient was ready is not recalled.
    assert starts[1:] == sorted(starts[1:]), starts
    assert 0 in starts
