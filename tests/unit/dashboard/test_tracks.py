"""Sorting a trace's events into tracks."""

import numpy as np

from ddltrace.dashboard.timeline.range_summary import summarize
from ddltrace.dashboard.timeline.tracks import Role

MS = 1_000_000


def track(opened, rank, kind):
    return next(t for t in opened.timeline.tracks if (t.rank, t.kind) == (rank, kind))


def rows(opened, wanted):
    return opened.timeline.rows[wanted.first_row : wanted.first_row + wanted.num_rows]


def labels(opened, row):
    return [opened.timeline.names[name] for name in row.name]


def test_every_rank_has_its_tracks_in_order(opened):
    kinds = ["steps", "compute", "gradients", "waits", "communication", "exposed"]
    assert [(t.rank, t.kind) for t in opened.timeline.tracks] == [
        (rank, kind) for rank in (0, 1) for kind in kinds
    ]


def test_layers_nest_under_phases(opened):
    outer, inner = rows(opened, track(opened, 0, "compute"))
    assert labels(opened, outer)[:4] == ["batch", "forward", "backward", "optimizer"]
    assert [Role(r) for r in outer.role[:4]] == [
        Role.DATA,
        Role.FORWARD,
        Role.BACKWARD,
        Role.UPDATE,
    ]
    assert labels(opened, inner)[:2] == ["net.conv", "net.fc"]


def test_overlapping_messages_stack(opened):
    first, second = rows(opened, track(opened, 0, "communication"))
    assert labels(opened, first)[0] == "all_reduce 4.00 kB"
    assert labels(opened, second)[0] == "all_reduce 8.00 kB"
    assert first.index.end(np.array([0]))[0] > second.index.start[0]


def test_gradients_are_called_by_their_tensor(opened):
    (row,) = rows(opened, track(opened, 0, "gradients"))
    assert labels(opened, row)[:2] == ["net.fc.weight", "net.conv.weight"]


def test_messages_that_never_completed_reach_to_the_end(opened):
    everything = rows(opened, track(opened, 0, "communication"))
    found = [
        row.index.end(np.array([position]))[0]
        for row in everything
        for position in np.flatnonzero(row.role == Role.UNFINISHED)
    ]
    assert found == [404 * MS]


def test_sends_are_told_from_collectives(opened):
    roles = {Role(r) for row in rows(opened, track(opened, 1, "communication")) for r in row.role}
    assert roles == {Role.COLLECTIVE, Role.P2P, Role.UNFINISHED}


def test_steps_carry_their_numbers(opened):
    (row,) = rows(opened, track(opened, 1, "steps"))
    assert row.name.tolist() == [0, 1, 2, 3]


def test_every_event_stands_in_one_row(opened):
    for rank in (0, 1):
        shown = np.concatenate(
            [
                row.event
                for t in opened.timeline.tracks
                if t.rank == rank and t.kind != "exposed"
                for row in rows(opened, t)
            ]
        )
        assert sorted(shown.tolist()) == list(range(opened.trace.events(rank).num_rows))


def test_an_event_is_found_in_its_row(opened):
    for number, row in enumerate(opened.timeline.rows):
        if row.event[0] >= 0:
            rank = next(
                t.rank
                for t in opened.timeline.tracks
                if t.first_row <= number < t.first_row + t.num_rows
            )
            assert opened.timeline.row_of_event(rank, int(row.event[0])) == (number, 0)
    assert opened.timeline.row_of_event(0, 10**6) is None


def test_a_range_is_summed_by_kind_and_name(opened):
    """Against a sum over the single intervals."""
    timeline = opened.timeline
    begin, end = 90 * MS, 210 * MS
    for chosen in (None, [1]):
        expected = {}
        for one in timeline.tracks:
            if chosen is not None and one.rank not in chosen:
                continue
            for row in rows(opened, one):
                names = row.label(np.arange(len(row.index)))
                for at, (role, name) in enumerate(zip(row.role, names, strict=True)):
                    start = int(row.index.start[at])
                    stop = int(row.index.end(np.array([at]))[0])
                    if start >= end or (stop <= begin and start < begin):
                        continue
                    label = "" if role == Role.STEP else timeline.names[name]
                    key = (Role(role).name.lower(), label)
                    count, total, ranks = expected.get(key, (0, 0, set()))
                    inside = min(stop, end) - max(start, begin)
                    expected[key] = (count + 1, total + inside, ranks | {one.rank})
        found = summarize(timeline, begin, end, chosen)
        assert {(row.kind, row.name): (row.count, row.total_ns, row.ranks) for row in found} == {
            key: (count, total, len(ranks)) for key, (count, total, ranks) in expected.items()
        }
        assert [row.total_ns for row in found] == sorted(
            (row.total_ns for row in found), reverse=True
        )
        assert any(row.kind == "step" for row in found)
        assert any(row.name.startswith("all_reduce") for row in found)
    assert summarize(timeline, timeline.span_ns + 1, timeline.span_ns + 2) == []
