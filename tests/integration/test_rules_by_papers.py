"""DiLoCo, SparseLoCo and OD-SGD in real jobs beside their papers' rules in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import scripts
from support.jobs import on_ranks, run

JOB = Path(__file__).parent / "jobs" / "rules_job.py"
DILOCO = "diloco:period=3,outer_lr=0.7,outer_momentum=0.9"
SPARSELOCO = "diloco:period=3,outer_lr=0.8+topk:density=0.25+feedback:decay=0.95"
ODSGD = "odsgd:warmup=0"
RANKS = 3

Vector = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def job() -> Any:
    return scripts.load(JOB)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    output = tmp_path_factory.mktemp("rules") / "found.json"
    command = on_ranks(JOB, str(output), DILOCO, SPARSELOCO, ODSGD, ranks=RANKS)
    done = run(command, cwd=output.parent, timeout=120)
    assert done.status == 0, done.stderr[-3000:]
    value: dict[str, list[float]] = json.loads(output.read_text())
    return value


def first(job: Any) -> Vector:
    return np.arange(job.SIZE) / job.SIZE


def gradient(job: Any, weights: Vector, step: int, rank: int) -> Vector:
    towards: Vector = job.target(step, rank).numpy()
    return weights - towards


@pytest.mark.long
def test_diloco_takes_nesterov_steps_on_the_mean_difference(
    job: Any, found: dict[str, list[float]]
) -> None:
    """arXiv 2311.08105, algorithm 1, with the outer optimizer of its experiments."""
    outer, velocity = first(job), np.zeros(job.SIZE)
    local = [outer.copy() for _ in range(RANKS)]
    for step in range(job.STEPS):
        local = [w - job.RATE * gradient(job, w, step, r) for r, w in enumerate(local)]
        if step % 3 == 2:
            difference = np.mean([outer - w for w in local], axis=0)
            velocity = 0.9 * velocity + difference
            outer = outer - 0.7 * (difference + 0.9 * velocity)
            local = [outer.copy() for _ in range(RANKS)]
    assert np.abs(outer - first(job)).max() > 0.1
    np.testing.assert_allclose(found[DILOCO], outer, rtol=0, atol=1e-6)


def test_sparseloco_sends_the_largest_of_a_decayed_sum_of_differences(
    job: Any, found: dict[str, list[float]]
) -> None:
    """arXiv 2508.15706, algorithm 1, with exact values and one chunk."""
    outer = first(job)
    local = [outer.copy() for _ in range(RANKS)]
    kept_back = [np.zeros(job.SIZE) for _ in range(RANKS)]
    for step in range(job.STEPS):
        local = [w - job.RATE * gradient(job, w, step, r) for r, w in enumerate(local)]
        if step % 3 == 2:
            sent = []
            for rank, weights in enumerate(local):
                total = 0.95 * kept_back[rank] + (outer - weights)
                chosen = np.argsort(-np.abs(total))[: job.SIZE // 4]
                message = np.zeros(job.SIZE)
                message[chosen] = total[chosen]
                kept_back[rank] = total - message
                sent.append(message)
            outer = outer - 0.8 * np.mean(sent, axis=0)
            local = [outer.copy() for _ in range(RANKS)]
    assert max(np.abs(each).max() for each in kept_back) > 0.01
    np.testing.assert_allclose(found[SPARSELOCO], outer, rtol=0, atol=1e-6)


def test_odsgd_applies_the_mean_gradient_of_the_step_before(
    job: Any, found: dict[str, list[float]]
) -> None:
    """arXiv 2005.06728: gradients of a local copy that is one own step ahead."""
    everywhere = first(job)
    local = [everywhere.copy() for _ in range(RANKS)]
    pending: list[Vector] = []
    for step in range(job.STEPS):
        gradients = [gradient(job, w, step, rank) for rank, w in enumerate(local)]
        if pending:
            everywhere = everywhere - job.RATE * np.mean(pending, axis=0)
        local = [everywhere - job.RATE * each for each in gradients]
        pending = gradients
    everywhere = everywhere - job.RATE * np.mean(pending, axis=0)
    np.testing.assert_allclose(found[ODSGD], everywhere, rtol=0, atol=1e-6)
