"""Every workload is real data and a model that learns it, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from ddltrace.experiments.workloads import WORKLOADS, create
from ddltrace.experiments.workloads.base import Workload

STEPS = 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine these wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Accuracy on held-out data after 40 steps; by guessing: 0.1, 0.1, 0.1, twice 0.19 (a blank is
# the most frequent character), 0.5.
REACHED = {"digits": 0.5, "vgg": 0.3, "resnet": 0.5, "gpt": 0.25, "moe": 0.25, "recommender": 0.6}


def small(name: str, seed: int = 0) -> Workload:
    width = {"gpt": 64, "moe": 64}.get(name, 16)
    return create(name, width=width, batch_size=2 * WORKLOADS[name].batch_size, seed=seed)


def test_all_are_checked() -> None:
    assert set(REACHED) == set(WORKLOADS)


@pytest.mark.parametrize("name", REACHED)
def test_it_learns(name: str) -> None:
    workload = small(name)
    optimizer = workload.optimizer(WORKLOADS[name].learning_rate)
    before = workload.score()
    for inputs, targets in islice(workload.batches(0, 1), STEPS):
        optimizer.zero_grad()
        workload.loss(workload.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = workload.score()
    assert after.train_loss < before.train_loss
    assert after.test_loss < before.test_loss
    assert REACHED[name] < after.test_accuracy <= 1


@pytest.mark.parametrize("name", REACHED)
def test_the_seed_decides_weights_and_order(name: str) -> None:
    first, same, other = small(name), small(name), small(name, seed=1)
    weights = [torch.cat([p.flatten() for p in w.model.parameters()]) for w in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    batches = [next(w.batches(0, 2))[0] for w in (first, same, other)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


@pytest.mark.parametrize("name", REACHED)
def test_ranks_have_different_examples(name: str) -> None:
    workload = small(name)
    left, right = (next(workload.batches(rank, 2))[0] for rank in (0, 1))
    assert left.shape == right.shape
    assert not torch.equal(left, right)


def test_the_last_layers_of_vgg_hold_most_bytes() -> None:
    workload = create("vgg", width=32, batch_size=1, seed=0)
    sizes = {name: p.numel() for name, p in workload.model.named_parameters()}
    dense = sum(
        p.numel()
        for m in workload.model.modules()
        if isinstance(m, torch.nn.Linear)
        for p in m.parameters()
    )
    assert dense / sum(sizes.values()) == pytest.approx(0.86, abs=0.01)


def test_gradients_of_embeddings_are_sparse() -> None:
    workload = small("recommender")
    inputs, targets = next(workload.batches(0, 1))
    workload.loss(workload.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in workload.model.named_parameters()}
    sparse = {name for name, grad in gradients.items() if grad is not None and grad.is_sparse}
    assert sparse == {"modules_table.weight", "names_table.weight"}


def test_a_batch_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one rank's share"):
        next(create("digits", width=1, batch_size=5000, seed=0).batches(0, 2))
