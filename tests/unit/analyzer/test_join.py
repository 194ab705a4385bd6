from __future__ import annotations

import statistics

import numpy as np
import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.events.event_columns import NULL
from ddltrace.analyzer.joined.join import State, join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.query.result_tables import collectives_table


def _join(trace):
    return join(trace, {rank: scan.messages for rank, scan in scan_ranks(trace).items()})


def test_arrival_wait_and_transfer_of_one_collective(build):
    built = build(3)
    for rank, start in enumerate((10, 30, 14)):
        built[rank].message("all_reduce", start, 50 + rank, seq=0, bytes=8, out_bytes=8)
    joined = _join(built.trace())
    one = joined.collectives
    assert len(one) == 1
    assert one.state.tolist() == [State.COMPLETE]
    assert (one.first[0], one.last[0], one.others[0]) == (10_000, 30_000, 12_000)
    assert (one.last_rank[0], one.end[0], one.wait[0]) == (1, 52_000, 36_000)
    wait, transfer = joined.wait_and_transfer()
    assert wait.tolist() == [20_000, 0, 16_000]
    assert transfer.tolist() == [20_000, 21_000, 22_000]
    assert joined.releaser.tolist() == [1, 1, 1]


def test_the_same_number_in_other_groups_is_another_collective(build):
    built = build(2)
    for rank in range(2):
        for group in ("0", "1"):
            built[rank].message("barrier", 1, 2, seq=0, group=group)
    assert len(_join(built.trace()).collectives) == 2


def test_one_name_for_two_groups_is_two_groups(build):
    # Ranks that make a group without the others may use one name for different members.
    built = build(4)
    info = built.groups[0]
    for rank in range(4):
        members = (0, 1) if rank < 2 else (2, 3)
        built[rank].info_changes["groups"] = [
            info.__class__("mine", "", "gloo", members),
        ]
        built[rank].message("all_reduce", rank, 9, seq=0, group="mine", bytes=4)
    joined = _join(built.trace())
    assert sorted(joined.collectives.last_rank.tolist()) == [1, 3]
    assert joined.collectives.state.tolist() == [State.COMPLETE] * 2


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"op": "broadcast"}, State.MISMATCH),
        ({"bytes": 12}, State.MISMATCH),
        ({"seq": 1}, State.PARTIAL),
        ({"end": None}, State.OPEN),
        ({"end": None, "status": "ok"}, State.COMPLETE),
    ],
)
def test_what_does_not_fit_is_told_apart(build, change, state):
    built = build(2)
    built[0].message("all_reduce", 0, 5, seq=0, bytes=8)
    arguments = {"op": "all_reduce", "start": 1, "end": 5, "seq": 0, "bytes": 8} | change
    built[1].message(**arguments)
    assert _join(built.trace()).collectives.state[0] == state


def test_a_completion_at_an_unknown_time_is_no_open_collective(build):
    built = build(2)
    for rank in range(2):
        built[rank].message("all_reduce", rank, None, seq=0, bytes=8, status="ok")
        built[rank].message("all_reduce", 10 + rank, 15, seq=1, bytes=8)
    analyzed = analyze_in_full(built.trace())
    analysis = analyzed.analysis
    assert (analysis.joining.complete, analysis.joining.open) == (2, 0)
    # Its transfer is not known: the times are the other's.
    (row,) = analysis.collectives
    assert (row.count, row.incomplete, row.transfer_us, row.wait_us) == (2, 1, 4.0, 0.5)
    assert collectives_table(analyzed)["transfer_us"].to_pylist() == [None, 4.0]
    assert not analysis.hangs


def test_a_collective_twice_on_one_rank_is_a_mismatch(build):
    built = build(2)
    for rank in (0, 0, 1):
        built[rank].message("all_reduce", 0, 5, seq=0, bytes=8)
    assert _join(built.trace()).collectives.state.tolist() == [State.MISMATCH]


def test_without_numbers_the_order_in_the_group_joins(build):
    built = build(2)
    for rank in range(2):
        for number in range(3):
            built[rank].message("all_reduce", 10 * number + rank, 10 * number + 5, bytes=number)
    joined = _join(built.trace())
    assert joined.by_order
    assert joined.collectives.seq.tolist() == [0, 1, 2]
    assert joined.collectives.state.tolist() == [State.COMPLETE] * 3
    assert joined.collectives.last_rank.tolist() == [1, 1, 1]


def test_a_broadcast_waits_for_its_root_only(build):
    built = build(3)
    starts = {0: 10, 1: 5, 2: 90}  # the root is rank 0; rank 2 comes when all is over
    for rank, start in starts.items():
        built[rank].message("broadcast", start, max(start + 5, 20), seq=0, peer=0, bytes=4)
    joined = _join(built.trace())
    wait, _ = joined.wait_and_transfer()
    assert wait.tolist() == [0, 5_000, 0]
    assert joined.releaser.tolist() == [0, 0, 2]


def test_sends_find_their_receives_by_tag_and_number(build):
    built = build(2)
    for tag in (7, 8):
        for number in range(2):
            built[0].message("send", 10 + number, 20, peer=1, tag=tag, seq=number, bytes=tag)
            built[1].message("recv", 5, 30, peer=0, tag=tag, seq=number, out_bytes=tag)
    lost = built[1].message("recv", 50, 60, peer=0, tag=9, seq=0)
    joined = _join(built.trace())
    messages = joined.messages
    for row in np.flatnonzero(joined.partner != NULL):
        other = joined.partner[row]
        assert messages.tag[row] == messages.tag[other]
        assert messages.seq[row] == messages.seq[other]
        assert messages.rank[row] != messages.rank[other]
    assert (joined.partner == NULL).sum() == 1
    assert joined.partner[joined.rows(1)][-1] == NULL
    assert lost == 4
    wait, _ = joined.wait_and_transfer()
    receives = np.flatnonzero((joined.partner != NULL) & messages.op_is("recv"))
    assert sorted(wait[receives].tolist()) == [5_000, 5_000, 6_000, 6_000]


def test_clocks_that_disagree_make_no_negative_transfer(build):
    built = build(2)
    built[0].message("all_reduce", 0, 10, seq=0, bytes=4)
    built[1].message("all_reduce", 12, 20, seq=0, bytes=4)  # arrives after rank 0 has left
    wait, transfer = _join(built.trace()).wait_and_transfer()
    assert wait.tolist() == [10_000, 0]
    assert transfer.tolist() == [0, 8_000]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_lateness_is_the_arrival_minus_the_median_arrival_of_the_others(build, ranks):
    built = build(ranks)
    random = np.random.default_rng(ranks)
    arrivals = np.sort(random.choice(np.arange(1, 1000), (20, ranks), replace=False), axis=1)
    arrivals = random.permuted(arrivals, axis=1)
    for number, of_ranks in enumerate(arrivals.tolist()):
        for rank, arrival in enumerate(of_ranks):
            at = 2000 * number + arrival
            built[rank].message("all_reduce", at, 2000 * number + 1500, seq=number, bytes=8)
    analyzed = analyze_in_full(built.trace())
    expected = [max(row) - statistics.median(sorted(row)[:-1]) for row in arrivals.tolist()]
    table = collectives_table(analyzed)
    assert table["lateness_us"].to_pylist() == pytest.approx(expected)
    stragglers = analyzed.analysis.stragglers
    assert sum(row.lateness_us_total for row in stragglers) == pytest.approx(sum(expected))
