"""Hybrid sharding on an unchanged job: islands that train alone, and sums in two levels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.jobs import DDLTRACE, on_ranks, run
from support.sampling import sampled
from torch import nn
from torch.distributed import fsdp

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.experiments.codecs import create
from ddltrace.experiments.parallelism.sharded_messages import _has_two_levels
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.errors import UsageError

JOB = Path(__file__).parent / "jobs" / "hybrid_job.py"
STEPS, RATE = 12, 0.05
Weights = list[torch.Tensor]


class Ran:
    """The job, run with a strategy or without."""

    def __init__(self, folder: Path, spec: str | None, *changes: str) -> None:
        job = on_ranks(JOB, "losses", *changes, ranks=4)
        strategy = [*DDLTRACE, "run", "-o", "trace", "--level", "comm", "--strategy"]
        folder.mkdir(exist_ok=True)
        self.done = run(job if spec is None else [*strategy, str(spec), "--", *job], cwd=folder)
        self.folder = folder
        if self.done.status == 0:
            texts = (folder / "losses").read_text().splitlines()
            self.losses = [float.fromhex(text) for text in texts]
            self.shards: list[list[Weights]] = [
                torch.load(folder / f"losses-{rank}") for rank in range(4)
            ]

    def island(self, number: int, step: int) -> Weights:
        """All weights of an island after a step."""
        first, second = (self.shards[2 * number + rank][step] for rank in range(2))
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]

    def messages(self, op: str) -> Counter[tuple[int, ...]]:
        """Messages of an operation on rank 0, by the ranks of their group."""
        trace = open_trace(self.folder / "trace")
        ranks = {group.name: group.ranks for group in trace.infos(0)[-1].groups}
        count: Counter[tuple[int, ...]] = Counter()
        for row in trace.events(0).to_pylist():
            if row["kind"] == "message" and row["op"] == op:
                count[ranks[row["group"]]] += 1
        return count

    def bytes_of(self, op: str, step: int) -> Counter[int]:
        """Bytes of rank 0's messages of an operation in one step, by the size of their group."""
        trace = open_trace(self.folder / "trace")
        ranks = {}
        for group in trace.infos(0)[-1].groups:
            ranks[group.name] = ranks[group.description.removeprefix("ddltrace:")] = group.ranks
        size: Counter[int] = Counter()
        for row in trace.events(0).to_pylist():
            if row["kind"] == "message" and row["op"] == op and row["step"] == step:
                size[len(ranks[row["group"]])] += row["bytes"]
        return size


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("local"), "localsgd:period=4+fsdp")


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh()),
        *(nn.Linear(96, 63), nn.Linear(63, 4)),
    )


def gradients(model: nn.Module, step: int, rank: int) -> Weights:
    """What a rank of the job computes."""
    inputs = torch.randn(32, 24, generator=torch.Generator().manual_seed(step * 7 + rank))
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def mean(*several: Weights) -> Weights:
    return [torch.stack(parts).mean(0) for parts in zip(*several, strict=True)]


def outer_steps(period: int) -> list[list[Weights]]:
    """DiLoCo by hand: the weights of both islands after each step."""
    islands = [a_model(), a_model()]
    outer = [weight.detach().clone() for weight in islands[0].parameters()]
    momenta = [torch.zeros_like(weight) for weight in outer]
    after = []
    for step in range(STEPS):
        with torch.no_grad():
            for number, model in enumerate(islands):
                with torch.enable_grad():
                    own = [gradients(model, step, 2 * number + rank) for rank in range(2)]
                for weight, gradient in zip(model.parameters(), mean(*own), strict=True):
                    weight.sub_(RATE * gradient)
            if (step + 1) % period == 0:
                average = mean(*([*model.parameters()] for model in islands))
                for weight, momentum, now in zip(outer, momenta, average, strict=True):
                    distance = weight - now
                    momentum.mul_(0.9).add_(distance)
                    weight.sub_(0.7 * (distance + 0.9 * momentum))
                for model in islands:
                    for own_weight, weight in zip(model.parameters(), outer, strict=True):
                        own_weight.copy_(weight)
        after.append([[w.detach().clone() for w in model.parameters()] for model in islands])
    return after


def close(found: Weights, expected: Weights) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True)
    )


def equal(found: Weights, expected: Weights) -> bool:
    return all(map(torch.equal, found, expected))


def test_averages_after_every_step_are_hybrid_sharding(plain: Ran, tmp_path: Path) -> None:
    every = Ran(tmp_path, "localsgd:period=1+fsdp")
    assert every.done.status == 0, every.done.stderr
    assert every.losses == pytest.approx(plain.losses, rel=1e-5)
    assert close(every.island(0, STEPS - 1), plain.island(0, STEPS - 1))


def test_islands_are_equal_after_an_average_only(local: Ran) -> None:
    assert local.done.status == 0, local.done.stderr
    same = [equal(local.island(0, step), local.island(1, step)) for step in range(STEPS)]
    assert same == [(step + 1) % 4 == 0 for step in range(STEPS)]


def test_an_island_reduces_its_own_gradients(local: Ran) -> None:
    """Before the first average, its weights are those of its two ranks alone."""
    for number in range(2):
        model = a_model()
        own = mean(*(gradients(model, 0, 2 * number + rank) for rank in range(2)))
        expected = [w - RATE * g for w, g in zip(model.parameters(), own, strict=True)]
        assert close(local.island(number, 0), expected)


def test_no_message_leaves_an_island_between_averages(local: Ran) -> None:
    reduced = local.messages("all_reduce")
    # The job's own, of its losses; and one average of all weights in four steps.
    assert reduced == {(0, 1, 2, 3): STEPS, (0, 2): STEPS // 4}
    assert local.messages("reduce_scatter").keys() == {(0, 1)}
    assert local.messages("all_gather").keys() == {(0, 1)}


def test_an_average_names_the_parameters_that_it_carries(local: Ran) -> None:
    trace = open_trace(local.folder / "trace")
    carried = [
        row["tensors"]
        for row in trace.events(0).to_pylist()
        if row["kind"] == "message" and row["name"] == "average of parameters"
    ]
    assert carried == [list(range(8))] * (STEPS // 4)


@pytest.mark.long
def test_outer_steps_are_those_by_hand(tmp_path: Path) -> None:
    found = Ran(tmp_path, "diloco:period=3+fsdp")
    assert found.done.status == 0, found.done.stderr
    for step, islands in enumerate(outer_steps(3)):
        for number, expected in enumerate(islands):
            assert close(found.island(number, step), expected), (step, number)


@pytest.mark.long
def test_a_checkpoint_keeps_the_outer_steps(tmp_path: Path) -> None:
    through, restarted = (
        Ran(tmp_path / name, "diloco:period=4+fsdp", *changes)
        for name, changes in (("through", ()), ("restarted", ("restart",)))
    )
    assert through.losses == restarted.losses


@pytest.mark.long
def test_islands_that_are_synchronous_at_first(plain: Ran, tmp_path: Path) -> None:
    found = Ran(tmp_path, "postlocalsgd:start=6,period=3+fsdp")
    assert found.done.status == 0, found.done.stderr
    # The loss of a step is computed before its update.
    assert found.losses[:7] == pytest.approx(plain.losses[:7], rel=1e-5)
    assert not equal(found.island(0, 7), found.island(1, 7))
    assert equal(found.island(0, 9), found.island(1, 9))


@pytest.mark.long
def test_a_mesh_without_names_and_encoded_messages(plain: Ran, tmp_path: Path) -> None:
    found = Ran(tmp_path, "localsgd:period=2+int8+fsdp:gather=int8,reduce=int8", "unnamed")
    assert found.done.status == 0, found.done.stderr
    assert found.losses != plain.losses
    assert found.losses == pytest.approx(plain.losses, rel=0.01)
    assert found.messages("all_to_all").keys() == {(0, 1)}


WITHOUT_ISLANDS = {
    "flat": "(replicate, shard), and the job gives a mesh of 1 dimensions",
    "held": "calls fully_shard by a reference from before its process group",
    "number": "the job gives a number of ranks as reshard_after_forward=",
    "dimensions": "(replicate, shard), and the job gives dp_mesh_dims=",
}
if not hasattr(fsdp, "DataParallelMeshDims"):  # of PyTorch 2.13
    del WITHOUT_ISLANDS["dimensions"]


@pytest.mark.long
@pytest.mark.parametrize(("change", "line"), sampled(list(WITHOUT_ISLANDS.items()), 1))
def test_a_job_without_islands_ends_with_a_line(change: str, line: str, tmp_path: Path) -> None:
    found = Ran(tmp_path, "localsgd:period=4+fsdp", change)
    assert found.done.status != 0
    assert found.done.stderr.count("strategy localsgd:period=4+fsdp cannot be applied: ") == 1
    assert line in found.done.stderr


def test_what_islands_cannot_have_is_refused() -> None:
    for spec in ("accumulate:steps=2+fsdp", "demo+fsdp", "muloco+fsdp", "localsgd+ring+fsdp"):
        with pytest.raises(UsageError, match="only fsdp can have a frequency technique"):
            parse(spec)
    assert not parse("fsdp").changes_sharded_job
    assert parse("localsgd:period=4+fsdp").cycle_steps == 4


def test_a_built_in_workload_has_no_islands(tmp_path: Path) -> None:
    command = [*DDLTRACE, "experiment", "run", "--workload", "gpt", "--strategy"]
    done = run([*command, "localsgd:period=4+fsdp"], cwd=tmp_path)
    assert done.status == 2
    assert "needs a job of your own, which calls fully_shard with a mesh of two" in done.stderr


def rows_of(weights: Weights, ranks: int) -> torch.Tensor:
    """What a reduce-scatter of these gradients sends to each rank, in FSDP's layout."""
    columns = []
    for weight in weights:
        part = -(-len(weight) // ranks)
        padded = weight.new_zeros(part * ranks, *weight.shape[1:])
        padded[: len(weight)] = weight
        columns.append(padded.view(ranks, -1))
    return torch.cat(columns, 1)


def lost(row: torch.Tensor) -> float:
    """What encoding loses of a vector: the norm of the difference."""
    codec = create("int4")
    return float((codec.decode(codec.encode(row)) - row).norm())


@pytest.fixture(scope="module")
def two_levels(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    # Ranks of a host that are no neighbours, in another order on each host.
    return Ran(tmp_path_factory.mktemp("two"), "qgz", "flat", "hosts=ABBA")


@pytest.mark.long
def test_a_sum_in_two_levels_loses_what_two_encodings_lose(two_levels: Ran) -> None:
    assert two_levels.done.status == 0, two_levels.done.stderr
    model = a_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    own = [gradients(model, 0, rank) for rank in range(4)]
    for layer in range(4):  # a weight and a bias are one message
        mine = slice(2 * layer, 2 * layer + 2)
        sent = [rows_of(weights[mine], 4) for weights in own]
        starts = rows_of(before[mine], 4)
        for rank in range(4):
            rows = [each[rank] for each in sent]
            exact = sum(rows, torch.zeros_like(rows[0])) / 4
            hosts = [rows[0] + rows[3], rows[1] + rows[2]]
            # The second encoding is of sums that the first one has changed.
            first = sum(lost(row) for row in rows)
            bound = (first + sum(lost(total) for total in hosts) + 0.2 * first) / 4
            after = [
                nn.functional.pad(shard, [0, 0] * (shard.dim() - 1) + [0, size - len(shard)])
                for shard, size in (
                    (each, -(-len(whole) // 4))
                    for each, whole in zip(
                        two_levels.shards[rank][0][mine], before[mine], strict=True
                    )
                )
            ]
            found = (starts[rank] - torch.cat([each.flatten() for each in after])) / RATE
            used = starts[rank] != 0
            error = float((found - exact)[used].norm())
            assert 0 < error <= bound, (layer, rank)


@pytest.mark.long
def test_two_levels_send_fewer_bytes_between_hosts(two_levels: Ran, tmp_path: Path) -> None:
    one_level = Ran(tmp_path, "fsdp:reduce=int4,ranks_per_host=1", "flat", "hosts=ABBA")
    flat, two = one_level.bytes_of("all_to_all", 4), two_levels.bytes_of("all_to_all", 4)
    assert flat.keys() == {4}
    # A rank sends a part to each rank: two of four are on the other host. In two levels it sends
    # two parts to each of its host's ranks, then one to each host.
    assert two == {2: flat[4] + flat[4] // 2}
    trace = open_trace(two_levels.folder / "trace")
    between = sum(
        row["bytes"]
        for row in trace.events(0).to_pylist()
        if row["kind"] == "message" and row["group"] == "between hosts 0,1" and row["step"] == 4
    )
    assert between == flat[4] // 2
    # A half of both goes to the other host.


def test_hosts_of_equal_size_make_two_levels() -> None:
    assert _has_two_levels([[0, 3], [1, 2]])
    for hosts in ([[0, 1, 2, 3]], [[0], [1]], [[0, 1, 2], [3]]):
        assert not _has_two_levels(hosts)
