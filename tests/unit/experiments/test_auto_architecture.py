"""What is chosen for which links."""

from __future__ import annotations

import pytest

from ddltrace.experiments.architectures.auto import Links
from ddltrace.experiments.architectures.ring import Ring


def links(hosts: list[int], *, inside: tuple[float, float], across: tuple[float, float]) -> Links:
    """Links of (latency in us, us a byte) for ranks on the given hosts."""

    def matrix(which: int) -> list[list[float]]:
        return [
            [0.0 if i == j else (inside if a == b else across)[which] for j, b in enumerate(hosts)]
            for i, a in enumerate(hosts)
        ]

    return Links(matrix(0), matrix(1))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2, 2, 0]])
def test_ranks_are_grouped_by_their_links(hosts: list[int]) -> None:
    found = links(hosts, inside=(10, 1e-4), across=(100, 1e-2))
    expected = [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
    assert sorted(found.hosts) == sorted(expected)
    crossings = sum(
        hosts[a] != hosts[b] for a, b in zip(found.order, found.order[1:], strict=False)
    )
    assert crossings == len(set(hosts)) - 1


def cluster(racks: int, hosts: int, ranks: int) -> Links:
    """Ranks on hosts in racks: links get ten times as slow with each level."""
    host_of = [rank // ranks for rank in range(racks * hosts * ranks)]
    levels = [[(a != b) + (a // hosts != b // hosts) for b in host_of] for a in host_of]
    return Links(
        [
            [0.0 if i == j else 10.0 * 10**level for j, level in enumerate(row)]
            for i, row in enumerate(levels)
        ],
        [
            [0.0 if i == j else 1e-4 * 10**level for j, level in enumerate(row)]
            for i, row in enumerate(levels)
        ],
    )


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 3, 2), (3, 2, 2)])
def test_hosts_are_grouped_into_racks(shape: tuple[int, int, int]) -> None:
    racks, hosts, ranks = shape
    found = cluster(*shape)
    assert len(found.racks) == racks
    assert [len(rack) for rack in found.racks] == [hosts] * racks
    assert found.hosts == [
        list(range(start, start + ranks)) for start in range(0, racks * hosts * ranks, ranks)
    ]
    assert found.order == list(range(racks * hosts * ranks))
    chosen = found.choose(1 << 20, 4)
    assert chosen.name.count("=") == 3
    flat = found.cost_us(found.plan("ring", 1 << 20), 4)
    assert chosen.cost_us < flat
    reported = found.to_json()
    assert reported["racks"] == found.racks
    assert reported["choices"][-1]["name"] == found.choose(1 << 24, 4).name
    assert " | " in found.describe()


@pytest.mark.parametrize("elements", [1, 7, 100])
def test_a_plan_of_three_levels_sums(elements: int) -> None:
    found = cluster(2, 3, 2)
    for name in found._candidates()[-27::5]:
        vectors = [[float(rank + 1)] * elements for rank in range(12)]
        for transfers in found.plan(name, elements):
            sent = [(t, vectors[t.source][t.start : t.stop]) for t in transfers]
            for t, values in sent:
                for place, value in zip(range(t.start, t.stop), values, strict=True):
                    old = vectors[t.target][place] if t.reduces else 0.0
                    vectors[t.target][place] = old + value
        assert vectors == [[78.0] * elements] * 12, name


def test_equal_links_are_one_group() -> None:
    found = links([0] * 5, inside=(50, 1e-3), across=(50, 1e-3))
    assert found.hosts == [[0, 1, 2, 3, 4]]
    assert not any("hierarchical" in name for name in found._candidates())


def test_small_messages_save_rounds_and_large_ones_bytes() -> None:
    found = links([0] * 8, inside=(100, 1e-3), across=(100, 1e-3))
    small, large = found.choose(1, 4), found.choose(1 << 24, 4)
    assert small.cost_us < found.cost_us(Ring().plan(range(8), 1), 4) + 1e-9
    assert small.name != "ring"
    # No all-reduce sends less than 2 (p - 1) / p of its bytes from each rank.
    assert large.cost_us < 1.05 * 2 * 7 / 8 * (4 << 24) * 1e-3


def test_slow_links_between_hosts_are_used_least() -> None:
    found = links([0, 0, 0, 0, 1, 1, 1, 1], inside=(5, 1e-5), across=(200, 1e-2))
    chosen = found.choose(1 << 20, 4)
    flat = found.cost_us(found.plan("mesh", 1 << 20), 4)
    assert chosen.cost_us < flat / 2
    assert "0,1,2,3; 4,5,6,7" in found.describe()
