"""Groups of the ranks of a large job."""

import numpy as np

from ddltrace.dashboard.timeline.lod import RowIndex
from ddltrace.dashboard.timeline.rank_groups import rank_groups
from ddltrace.dashboard.timeline.tracks import Timeline, Track


def timeline(compute, *, devices=()):
    """Ranks that compute for the given times and communicate for 10 each."""
    found = Timeline()
    for rank, length in enumerate(compute):
        busy = [np.array([value]) for value in (0, length, 0, 10)]
        found.busy[rank] = RowIndex(busy[0], busy[1]), RowIndex(busy[2], busy[3])
        kinds = ["compute", "device"] if rank in devices else ["compute"]
        found.tracks += [Track(rank, kind, kind, 0, 1, False) for kind in kinds]
    return found


def hosts(count, per_host=4):
    return {rank: f"n{rank // per_host}" for rank in range(count)}


def shown(groups):
    return [(group.title, group.ranks) for group in groups]


def test_few_ranks_are_not_grouped():
    assert rank_groups(timeline([100] * 8), hosts(8)) == []


def test_ranks_stand_by_host_and_what_stands_out_first():
    compute = [100, 101, 99, 100, 102, 180, 100, 98, 100, 60, 101, 100]
    groups = rank_groups(timeline(compute), hosts(12))
    assert groups[0].is_outliers
    assert groups[0].ranks == [5, 9]
    assert shown(groups[1:]) == [
        ("n0", [0, 1, 2, 3]),
        ("n1", [4, 6, 7]),
        ("n2", [8, 10, 11]),
    ]


def test_small_differences_do_not_stand_out():
    assert not any(g.is_outliers for g in rank_groups(timeline([100] * 11 + [104]), hosts(12)))


def test_ranks_of_a_host_that_do_other_work_are_apart():
    groups = rank_groups(timeline([100] * 12, devices=(0, 1, 4, 5, 6, 7)), hosts(12))
    assert shown(groups) == [
        ("n0, with device", [0, 1]),
        ("n0, nothing else", [2, 3]),
        ("n1", [4, 5, 6, 7]),
        ("n2", [8, 9, 10, 11]),
    ]
