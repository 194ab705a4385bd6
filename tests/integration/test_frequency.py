"""Every frequency on two ranks over Gloo, beside what it has to equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import scripts
from support.jobs import on_ranks, run
from support.simulated import simulated_training

JOB = Path(__file__).parent / "jobs" / "frequency_job.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("frequency") / "report.json"
    done = run(on_ranks(JOB, str(output), ranks=2), cwd=output.parent, timeout=280)
    assert done.status == 0, done.stderr[-4000:]
    value: dict[str, Any] = json.loads(output.read_text())
    return value


@pytest.mark.long
def test_frequencies_equal_what_their_papers_reduce_them_to(report: dict[str, Any]) -> None:
    assert report["moved"] > 0.01  # training does something that could differ
    for pair, distance in report["distance"].items():
        assert distance < 2e-6, pair


@pytest.mark.long
def test_pytorchs_implementations_compress_what_ours_compress(report: dict[str, Any]) -> None:
    assert len(report["compression"]) == 6
    for spec, moved in report["compression"].items():
        assert moved > 100 * report["distance"][f"{spec} = PyTorch's"], spec


def test_replicas_are_equal_after_each_round_and_only_then(report: dict[str, Any]) -> None:
    for case, equal in report["equal"].items():
        spec = case.split()[0]
        name, _, rest = spec.partition(":")
        if name in {"localsgd", "diloco"}:
            period = int(rest.partition("period=")[2].partition(",")[0].partition("+")[0])
            assert equal == [(step + 1) % period == 0 for step in range(len(equal))], case
        elif name in {"ddp", "demo", "accumulate", "dion", "muon"}:
            assert all(equal), case


def test_the_transform_of_demo_is_orthonormal(report: dict[str, Any]) -> None:
    assert report["demo"]["inverse"] < 1e-5
    assert report["demo"]["energy"] < 1e-4


def test_demo_averages_a_coefficient_over_the_ranks_that_sent_it(report: dict[str, Any]) -> None:
    assert report["demo_alone"] > 0  # not all ranks choose the same
    assert report["demo_senders"] < 1e-6


def test_demo_with_all_coefficients_is_sign_sgd_and_keeps_nothing(report: dict[str, Any]) -> None:
    assert report["demo_sign"] < 1e-6
    assert report["demo_left"] < 1e-6


def test_simulated_ranks_reach_what_real_ranks_reach_to_the_last_bit(
    report: dict[str, Any],
) -> None:
    job = scripts.load(JOB)
    simulation = simulated_training()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as torchrun's ranks: sums depend on how they are divided
    try:
        compare_with_simulation(report, job, simulation)
    finally:
        torch.set_num_threads(threads)


def compare_with_simulation(report: dict[str, Any], job: Any, simulation: Any) -> None:
    assert len(report["simulated"]) == len(job.SIMULATED)
    for spec, kind in job.SIMULATED:

        def replica(rank: int, kind: str = kind) -> Any:
            model = job.network()
            return simulation.Replica(
                model,
                job.optimizer_of(model, kind),
                lambda step: model(job.batch(step, rank)).square().mean(),
            )

        replicas = simulation.train(spec, 2, job.STEPS, replica)
        own = simulation.parameters_of(replicas)[0]
        assert torch.equal(own, torch.tensor(report["simulated"][f"{spec} {kind}"])), spec
