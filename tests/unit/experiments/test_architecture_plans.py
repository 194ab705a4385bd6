"""Plans of architectures, executed on numpy vectors: sums, message counts and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from ddltrace.experiments.architectures.auto import Links
from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.double_tree import DoubleTree
from ddltrace.experiments.architectures.halving_doubling import HalvingDoubling
from ddltrace.experiments.architectures.hierarchical import LEVELS, Hierarchical, hosts_of
from ddltrace.experiments.architectures.mesh import Mesh
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.placement import keys_of_slices, place
from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.architectures.transfers import Round
from ddltrace.experiments.architectures.tree import Tree

RANKS = [1, 2, 3, 5, 6, 8]
SIZES = [0, 1, 2, 3, 5, 7, 8, 64, 1000, 1001]
ALL = [*LEVELS.values(), ParameterServer(), ParameterServer(servers=3)]


def sent_elements(rounds: Sequence[Round]) -> dict[int, int]:
    """Elements that each rank sends; ranks that send none are missing."""
    sent: dict[int, int] = {}
    for transfers in rounds:
        for transfer in transfers:
            sent[transfer.source] = sent.get(transfer.source, 0) + transfer.elements
    return sent


def execute(rounds: Sequence[Round], vectors: dict[int, np.ndarray]) -> None:
    """Runs a plan: within a round everything is sent before anything is received."""
    for transfers in rounds:
        sent = [vectors[t.source][t.start : t.stop].copy() for t in transfers]
        written: dict[int, list[tuple[int, int]]] = {}
        for transfer, values in zip(transfers, sent, strict=True):
            assert transfer.elements > 0
            assert transfer.source != transfer.target
            target = vectors[transfer.target][transfer.start : transfer.stop]
            if transfer.reduces:
                target += values
            else:
                for start, stop in written.get(transfer.target, ()):
                    assert transfer.stop <= start or stop <= transfer.start, "written twice"
                written.setdefault(transfer.target, []).append((transfer.start, transfer.stop))
                target[:] = values


def check(rounds: Sequence[Round], workers: Sequence[int], servers: int, elements: int) -> None:
    random = np.random.default_rng(elements)
    vectors = {rank: random.integers(-1000, 1000, elements) for rank in workers}
    expected = sum(vectors.values())
    vectors |= {len(workers) + n: np.zeros(elements, dtype=np.int64) for n in range(servers)}
    execute(rounds, vectors)
    for rank in workers:
        np.testing.assert_array_equal(vectors[rank], expected)


@pytest.mark.parametrize("architecture", ALL, ids=str)
@pytest.mark.parametrize("size", RANKS)
def test_every_rank_gets_the_sum(architecture: Architecture, size: int) -> None:
    servers = architecture.dedicated() if isinstance(architecture, ParameterServer) else 0
    for elements in SIZES:
        rounds = architecture.plan(range(size + servers), elements)
        check(rounds, range(size), servers, elements)


@pytest.mark.parametrize("size", RANKS)
def test_the_order_of_ranks_is_free(size: int) -> None:
    order = [int(rank) for rank in np.random.default_rng(size).permutation(size)]
    for architecture in LEVELS.values():
        check(architecture.plan(order, 77), range(size), 0, 77)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("n", [64, 120, 1001])
def test_messages_and_elements_are_those_of_the_formula(size: int, n: int) -> None:
    p = size
    q = 2 ** int(math.log2(p))
    every = {
        Ring(): (2 * p * (p - 1), 2 * (p - 1) * n),
        Mesh(): (2 * p * (p - 1), 2 * (p - 1) * n),
        Tree(): (2 * (p - 1), 2 * (p - 1) * n),
        DoubleTree(): (4 * (p - 1), 2 * (p - 1) * n),
        HalvingDoubling(): (
            2 * q * int(math.log2(q)) + 2 * (p - q),
            2 * (q - 1) * n + 2 * (p - q) * n,
        ),
        ParameterServer(sharded=True): (2 * p * (p - 1), 2 * (p - 1) * n),
        ParameterServer(servers=2): (2 * p * 2, 2 * p * n),
    }
    for architecture, (messages, elements) in every.items():
        servers = architecture.dedicated() if isinstance(architecture, ParameterServer) else 0
        rounds = architecture.plan(range(p + servers), n)
        assert sum(map(len, rounds)) == messages, architecture
        assert sum(sent_elements(rounds).values()) == elements, architecture


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8])
def test_the_number_of_rounds_is_that_of_the_formula(size: int) -> None:
    up = math.ceil(math.log2(size))
    exact = math.log2(size).is_integer()
    assert len(Ring().plan(range(size), 100)) == 2 * (size - 1)
    assert len(Mesh().plan(range(size), 100)) == 2
    assert len(Tree().plan(range(size), 100)) == 2 * up
    assert len(HalvingDoubling().plan(range(size), 100)) == (
        2 * up if exact else 2 * (int(math.log2(size)) + 1)
    )


def test_a_ring_sends_evenly_and_only_to_the_next_rank() -> None:
    rounds = Ring().plan([2, 0, 1], 30)
    assert {(t.source, t.target) for r in rounds for t in r} == {(2, 0), (0, 1), (1, 2)}
    assert sent_elements(rounds) == {0: 40, 1: 40, 2: 40}


@pytest.mark.parametrize("size", range(3, 40))
def test_an_inner_rank_of_one_tree_is_a_leaf_of_the_other(size: int) -> None:
    reduction = DoubleTree().reduce(range(size), 2)
    receivers: list[set[int]] = [set(), set()]
    senders: list[list[int]] = [[], []]
    for transfers in reduction.rounds:
        for transfer in transfers:
            receivers[transfer.start].add(transfer.target)
            senders[transfer.start].append(transfer.source)
    assert not receivers[0] & receivers[1]
    assert [len(each) for each in senders] == [size - 1] * 2
    assert len(reduction.rounds) <= math.ceil(math.log2(size + 1))


@pytest.mark.parametrize("outer", LEVELS)
@pytest.mark.parametrize("inner", LEVELS)
def test_two_levels_sum_over_hosts_of_any_size(inner: str, outer: str) -> None:
    architecture = Hierarchical(inner, outer)  # type: ignore[arg-type]
    layouts = [[[0]], [[0, 1, 2]], [[0], [1], [2]], [[0, 1, 2], [3, 4]], [[0], [1, 2, 3, 4, 5]]]
    for hosts in [*layouts, hosts_of(range(8), 2)]:
        workers = [rank for ranks in hosts for rank in ranks]
        for elements in SIZES:
            check(architecture.plan(hosts, elements), workers, 0, elements)


@pytest.mark.parametrize("inner", ["ring", "mesh", "tree"])
def test_each_element_leaves_a_host_as_often_as_in_a_flat_ring_of_hosts(inner: str) -> None:
    hosts = hosts_of(range(8), 2)
    rounds = Hierarchical(inner, "ring").plan(hosts, 64)  # type: ignore[arg-type]
    crossing = sum(t.elements for r in rounds for t in r if t.source // 2 != t.target // 2)
    assert crossing == 2 * (len(hosts) - 1) * 64


def test_keys_are_placed_by_size() -> None:
    sizes = {0: 1_000_000, 1: 64, 2: 300_000, 3: 64, 4: 300_000, 5: 10, 6: 0}
    for servers in (1, 2, 3, 5, 8):
        placement = place(sizes, servers)
        assert sum(placement.loads) == sum(sizes.values())
        for tensor, elements in sizes.items():
            keys = [key for key in placement.keys if key.tensor == tensor]
            assert [key.start for key in keys][:1] == ([0] if elements else [])
            assert [a.stop for a in keys[:-1]] == [b.start for b in keys[1:]]
            assert sum(key.stop - key.start for key in keys) == elements
        assert placement.skew < 1.2
    assert place({}, 3).skew == 1
    assert place({0: 1}, 2).skew == 2  # one element cannot be on two servers


def test_tensors_are_cut_where_that_is_worth_a_message() -> None:
    small = dict.fromkeys(range(6), 3750)
    assert len(place(small, 4).keys) > 6
    assert len(place(small, 4, latency=12_500).keys) == 6
    assert len(place({0: 1_000_000}, 4, latency=12_500).keys) == 4
    links = Links([[0, 50, 70], [50, 0, 60], [70, 60, 0]], [[0, 1, 1], [1, 0, 0.5], [1, 0.5, 0]])
    assert links.latency_bytes == 70  # of 50, 70 and 120
    assert Links([[0]], [[0]]).latency_bytes == 0


def test_a_message_is_cut_at_the_keys_that_it_holds() -> None:
    placement = place({0: 20, 1: 2}, 2)
    bounds = [(key.tensor, key.start, key.stop) for key in placement.keys]
    assert bounds == [(0, 0, 10), (0, 10, 20), (1, 0, 2)]
    found = keys_of_slices(placement, [(1, 0, 2), (0, 8, 13)])
    assert [(start, stop) for start, stop, _ in found] == [(0, 2), (2, 4), (4, 7)]


@pytest.mark.parametrize(
    ("architecture", "size"), [(ParameterServer(4, True), 3), (ParameterServer(2), 2)]
)
def test_too_few_ranks_are_refused(architecture: ParameterServer, size: int) -> None:
    with pytest.raises(ValueError, match="need at least"):
        architecture.plan(range(size), 10)
