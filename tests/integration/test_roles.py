"""Jobs of several roles, which wait for each other: trainers and rollout workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from support.jobs import JOBS, free_port, on_ranks, ray_environment, run, traced

import ddltrace

ROLLOUT_US, UPDATE_US = 60e3, 30e3
"""How long a rank of each role sleeps in each iteration of ``two_roles.py``."""

GENERATE_US = 60e3
"""The shorter time that a worker of ``with_ray_roles.py`` generates; the longer one is twice it."""

TOLERANCE = 0.7
WEIGHTS_AND_BATCH = 4 * (256 * 256 + 256 + 32 * 256)


@pytest.mark.long
def test_roles_that_are_jobs_of_their_own(tmp_path: Path) -> None:
    """The times that the roles wait for each other are those that the job sleeps."""
    ports = [str(free_port()) for _ in range(3)]
    command = on_ranks("two_roles.py", *ports, ranks=4)
    done = run(traced(tmp_path / "trace", command), cwd=tmp_path)
    assert done.status == 0, done.stderr
    trace = ddltrace.open(tmp_path / "trace")
    assert [info.world_size for info in trace.run.ranks] == [4, 4, 4, 4]
    groups = {group.name: group.ranks for info in trace.run.ranks for group in info.groups}
    assert groups == {
        "0 (ranks 0-1)": (0, 1),
        "0 (ranks 2-3)": (2, 3),
        "weights": (0, 1, 2, 3),
    }
    analysis = trace.analyze()
    assert analysis.trace.notes == (
        "2 jobs beside each other: their ranks are 0-1 (trainer), 2-3 (rollout) here",
    )
    assert analysis.joining.collectives == analysis.joining.complete > 0
    rollout, trainer = analysis.roles
    assert (rollout.role, rollout.ranks) == ("rollout", (2, 3))
    assert (trainer.role, trainer.ranks) == ("trainer", (0, 1))
    steps = analysis.summary.steps
    slept, trained = steps * ROLLOUT_US, steps * UPDATE_US
    wall = trainer.wall_us
    for row in (rollout, trainer):
        # A trainer can begin to send weights while the other one has not ended its step.
        assert row.messages == pytest.approx(3 * steps, abs=2)
        assert row.bytes == pytest.approx(steps * WEIGHTS_AND_BATCH, abs=WEIGHTS_AND_BATCH)
        assert row.wall_us == wall
        assert row.busy_us + row.crossing_us + row.idle_us == pytest.approx(wall)
    # A busy machine makes all times longer, and the arrival of those who wait later.
    assert trainer.waits_for == "rollout"
    assert TOLERANCE * slept <= trainer.waits_for_us <= wall - trained
    assert trainer.idle_us >= TOLERANCE * trained
    assert rollout.waits_for == "trainer"
    assert TOLERANCE * trained <= rollout.waits_for_us <= wall - slept / 2
    # One of the two sleeps, while the other one waits for it in a message of their own.
    assert rollout.busy_us >= TOLERANCE * slept / 2
    assert rollout.idle_us >= TOLERANCE * slept / 2


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install 'ddltrace[clients]'",
)
@pytest.mark.long
def test_actors_of_ray(tmp_path: Path) -> None:
    """The trainers wait for the rollouts outside of messages: they idle while those generate."""
    ports = [str(free_port()) for _ in range(3)]
    job = [sys.executable, str(JOBS / "with_ray_roles.py"), *ports]
    done = run(
        traced(tmp_path / "trace", job), cwd=tmp_path, timeout=280, **ray_environment(tmp_path)
    )
    assert done.status == 0, done.stderr
    assert len(done.losses()) == 12
    assert "trace of 4 ranks" in done.stderr
    analysis = ddltrace.open(tmp_path / "trace").analyze()
    assert analysis.joining.collectives == analysis.joining.complete > 0
    worker, trainer = analysis.roles
    assert (worker.role, worker.ranks) == ("RolloutWorker", (2, 3))
    assert (trainer.role, trainer.ranks) == ("Trainer", (0, 1))
    steps = analysis.summary.steps
    assert worker.messages == trainer.messages == 4 * steps
    generated = steps * 2 * GENERATE_US
    assert worker.busy_us >= TOLERANCE * generated
    assert trainer.idle_beside == "RolloutWorker"
    assert TOLERANCE * generated <= trainer.idle_beside_us <= trainer.idle_us
    assert trainer.idle_us + trainer.busy_us + trainer.crossing_us == pytest.approx(trainer.wall_us)
