"""Measures of small traces whose answers were worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.sentences import sentences
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import GroupInfo, TensorInfo
from ddltrace.tracer.trace.trace_files import segment_name


def _ddp_step(built, rank, number, begin, *, late=0.0, tensors=()):
    """One step of 100 us: data 10, forward 30, backward 50, optimizer 10; late in forward."""
    one = built[rank]
    one.step = number
    one.add("data", begin, begin + 10, name="next batch")
    forward_end = begin + 40 + late
    one.add("phase", begin + 10, forward_end, name="forward")
    one.add("layer", begin + 12, begin + 38, name="net.fc")
    backward_end = begin + 90
    one.add("phase", forward_end, backward_end, name="backward")
    for tensor in tensors:
        one.add("gradient", begin + 60, begin + 60, tensors=[tensor])
    one.message(
        "all_reduce",
        begin + 62 + late,
        begin + 85,
        seq=number,
        bytes=400,
        out_bytes=400,
        tensors=list(tensors),
        name="bucket 0",
    )
    one.add("wait", begin + 75, backward_end, name="backward", parent=None)
    one.add("phase", backward_end, begin + 100, name="optimizer")
    one.whole_step(number, begin, begin + 100)


@pytest.fixture
def ddp(build):
    built = build(2)
    weight = built.tensor("net.fc.weight", 300)
    bias = built.tensor("net.fc.bias", 100)
    for number in range(3):
        for rank, late in ((0, 0.0), (1, 5.0)):
            _ddp_step(built, rank, number, 100 * number, late=late, tensors=(weight, bias))
    return built.trace()


def test_where_the_time_of_a_step_went(ddp):
    analysis = ddp.analyze()
    first, second = analysis.ranks
    # C: forward 30, backward 50 and optimizer 10 without the wait of 10 (75 to 85), 3 steps.
    assert first.compute_us == pytest.approx(3 * 80)
    assert first.comm_us == pytest.approx(3 * 23)
    # In flight 62 to 85, of which the rank computes until 75.
    assert first.overlap_us == pytest.approx(3 * 13)
    assert first.exposed_comm_us == pytest.approx(3 * 10)
    assert second.overlap_us == pytest.approx(3 * 8)
    assert first.overlap_ratio == pytest.approx(13 / 23)
    # Rank 0 waits from 62 to 67 for rank 1.
    assert (first.wait_us, first.transfer_us) == (pytest.approx(15), pytest.approx(54))
    assert (second.wait_us, second.transfer_us) == (pytest.approx(0), pytest.approx(54))
    assert (first.data_us, first.update_us) == (pytest.approx(30), pytest.approx(30))
    assert first.host_wait_us == pytest.approx(30)
    # Device work from 10 to 300, but for the two fetches of a batch in between.
    assert first.span_us == pytest.approx(290)
    assert first.idle_us == pytest.approx(20)
    assert first.bytes_sent == 1200
    assert first.messages == 3


def test_the_summary_is_over_steady_steps_and_its_shares_sum_to_one(ddp):
    summary = ddp.analyze().summary
    assert (summary.steps, summary.warmup_steps) == (2, 1)
    assert summary.step_us.p50 == pytest.approx(100)
    assert summary.overlap_ratio == pytest.approx((13 + 8) / (23 + 18))
    assert summary.compute_share == pytest.approx(0.80)
    assert summary.exposed_comm_share == pytest.approx(0.10)
    assert summary.idle_share == pytest.approx(0.10)
    # Rank 0 waits for rank 1 while it computes: no rank is blocked.
    assert summary.sync_overhead_share == 0
    assert summary.update_overhead_share == pytest.approx(0.10)
    assert summary.data_share == pytest.approx(0.10)


def test_a_collective_counts_once_and_its_time_begins_with_the_last(ddp):
    (row,) = ddp.analyze().collectives
    assert (row.op, row.group, row.count, row.bytes) == ("all_reduce", "0", 3, 400)
    assert row.transfer_us == pytest.approx(18)
    assert row.wait_us == pytest.approx(2.5)
    assert row.arrival_skew_us == pytest.approx(5)
    assert row.algbw_gbps == pytest.approx(400 * 8 / 18_000)
    assert row.busbw_gbps == pytest.approx(400 * 8 / 18_000)  # 2 (p - 1) / p = 1


def test_the_straggler_is_named_with_its_cause(ddp):
    (row,) = ddp.analyze().stragglers
    assert (row.rank, row.collectives_last, row.share) == (1, 2, 1.0)
    assert row.lateness_us == pytest.approx(5)
    assert not row.unsure


def test_the_life_of_a_tensor(ddp):
    rows = {row.name: row for row in ddp.analyze().tensors}
    weight = rows["net.fc.weight"]
    assert weight.ready_us == pytest.approx(60)
    assert weight.enqueue_us == pytest.approx(64.5)
    assert weight.complete_us == pytest.approx(85)
    assert weight.bucket == 2
    assert weight.messages == 1
    # Ten exposed microseconds on each rank, three quarters of the bytes.
    assert weight.exposed_us == pytest.approx(7.5)
    exposed = sum(row.exposed_us for row in rows.values())
    assert exposed == pytest.approx(10)


def test_selected_steps_only(ddp):
    analysis = ddp.analyze(range(1, 2))
    assert analysis.trace.steps == 1
    assert analysis.summary.steps == 1
    assert analysis.ranks[0].compute_us == pytest.approx(80)
    assert analysis.ranks[0].messages == 1
    assert analysis.collectives[0].count == 1
    with pytest.raises(TraceError, match="--steps 0:3"):
        ddp.analyze(range(7, 9))


def test_every_step_is_explained_to_the_last_nanosecond(ddp):
    analyzed = analyze_in_full(ddp)
    analysis = analyzed.analysis
    for row in analysis.steps:
        path = analyzed.paths[row.step]
        assert (path.start[1:] == path.end[:-1]).all()
        assert sum(path.totals_ns().values()) == round(row.wall_us * 1000)
    totals = analysis.steps[1].critical_path
    # The last to end is rank 0 or 1 at the optimizer; the wait from 75 to 85 is transfer
    # because both had arrived by 67, and the path stays where it is.
    assert totals.transfer_us == pytest.approx(10)
    assert totals.update_us == pytest.approx(10)
    assert totals.data_us == pytest.approx(10)
    assert totals.compute_us == pytest.approx(70)


def test_json_holds_the_keys_that_others_rely_on(ddp):
    value = json.loads(json.dumps(ddp.analyze().to_json(), allow_nan=False))
    assert value["schema"] == "ddltrace.analysis/1"
    keys = {
        "trace": {"world_size", "ranks", "hosts", "steps", "source", "events", "dropped"},
        "clock": {"method", "max_residual_us", "ranks"},
        "summary": {
            "step_us",
            "overlap_ratio",
            "compute_share",
            "exposed_comm_share",
            "idle_share",
            "sync_overhead_share",
            "update_overhead_share",
        },
    }
    for name, wanted in keys.items():
        assert wanted <= set(value[name])
    rows = {
        "ranks": "rank step_us_p50 span_us compute_us comm_us overlap_us overlap_ratio "
        "exposed_comm_us idle_us wait_us transfer_us data_us update_us bytes_sent messages",
        "steps": "step wall_us critical_path",
        "collectives": "op group count bytes algbw_gbps busbw_gbps wait_us transfer_us "
        "arrival_skew_us",
        "stragglers": "rank lateness_us collectives_last share",
        "tensors": "name bytes ready_us enqueue_us complete_us exposed_us",
    }
    for name, row_keys in rows.items():
        assert set(row_keys.split()) <= set(value[name][0])
    assert set(value["steps"][0]["critical_path"]) == {
        f"{part}_us"
        for part in (
            "total",
            "compute",
            "transfer",
            "wait",
            "update",
            "data",
            "copy",
            "host",
            "idle",
        )
    }
    assert value["p2p"] == []


def test_frames_have_one_row_per_thing(ddp):
    analysis = ddp.analyze()
    assert len(analysis.ranks_frame()) == 2
    assert len(analysis.steps_frame()) == 3
    assert len(analysis.rank_steps_frame()) == 6
    assert len(analysis.tensors_frame()) == 2
    assert np.allclose(analysis.rank_steps_frame()["wall_us"], 100)


def test_a_job_without_steps_is_one_window(build):
    built = build(2)
    for rank in range(2):
        built[rank].message(
            "send" if rank == 0 else "recv",
            10,
            40,
            peer=1 - rank,
            seq=0,
            tag=0,
            bytes=100 if rank == 0 else None,
            out_bytes=None if rank == 0 else 100,
        )
    analysis = built.trace().analyze()
    assert analysis.trace.steps == 0
    assert analysis.steps == ()
    assert analysis.summary.step_us.p50 is None
    # The trace does not record what the ranks computed.
    assert analysis.summary.compute_share is None
    assert analysis.summary.overlap_ratio is None
    assert analysis.ranks[0].idle_us is None
    (row,) = analysis.p2p
    assert (row.src, row.dst, row.count, row.bytes) == (0, 1, 1, 100)
    assert row.transfer_us == pytest.approx(30)


def test_an_empty_trace_is_measured_without_complaint(build):
    analysis = build(2).trace().analyze()
    assert analysis.trace.events == 0
    json.dumps(analysis.to_json(), allow_nan=False)


def test_an_open_message_extends_to_nothing_and_is_counted(build):
    built = build(2)
    built[0].add("phase", 0, 50, name="forward")
    built[0].message("all_reduce", 10, 20, seq=0, bytes=4)
    built[1].message("all_reduce", 10, 20, seq=0, bytes=4)
    built[0].message("all_reduce", 30, None, seq=1, bytes=4)
    analysis = built.trace().analyze()
    assert analysis.ranks[0].comm_us == pytest.approx(10)
    assert analysis.ranks[0].messages == 2
    assert analysis.ranks[0].open_messages == 1
    (hang,) = analysis.hangs
    assert (hang.op, hang.seq, hang.entered, hang.missing) == ("all_reduce", 1, (0,), (1,))
    assert "all_reduce" in hang.doing[1]


def test_a_message_that_completed_at_an_unknown_time_is_no_hang(build):
    built = build(2)
    for rank in (0, 1):
        built[rank].message("all_reduce", 10, None, seq=0, bytes=4, status="ok")
    built[0].message("send", 30, None, peer=1, seq=0, status="ok")
    built[0].message("all_reduce", 50, None, seq=1, bytes=4, status="open")
    analysis = built.trace().analyze()
    assert [row.open_messages for row in analysis.ranks] == [1, 0]
    (hang,) = analysis.hangs
    assert (hang.op, hang.seq, hang.missing) == ("all_reduce", 1, (1,))
    assert hang.doing[0] == "is in message all_reduce number 1 of group 0"
    assert hang.doing[1] == "last recorded message all_reduce"


def test_the_cause_of_a_hang_comes_before_what_waits_behind_it(build):
    built = build(4)
    built.groups.append(GroupInfo("1", "three", "gloo", (0, 1, 2)))
    for rank in (0, 1):
        built[rank].message("all_reduce", 30, None, seq=7, bytes=4, group="1")
    built[3].message("barrier", 31, None, seq=11)
    built[2].add("layer", 20, 90, name="loops")
    first, second = built.trace().analyze().hangs
    assert (first.group, first.entered, first.missing) == ("1", (0, 1), (2,))
    assert (second.op, second.missing) == ("barrier", (0, 1, 2))
    # The rank that is in no message of its own is named first.
    assert list(second.doing) == [2, 0, 1, 3]


@pytest.mark.parametrize(("waited", "hangs"), [(100, 0), (900, 1)])
def test_messages_in_flight_when_all_was_ended_are_no_hang(build, waited, hangs):
    built = build(2)
    for rank in (0, 1):
        for number in range(10):
            start = 1000 * number
            built[rank].message("all_reduce", start, start + 500, seq=number, bytes=4)
    built[0].message("all_reduce", 10_000, None, seq=10, bytes=4)
    built[1].add("layer", 9_600, 10_000 + waited, name="a")
    assert len(built.trace().analyze().hangs) == hangs


def _ended(build, statuses, *, hangs_us=0):
    """A trace whose ranks 0 and 1 ended at 3 s and 2 s, rank 1 after entering a message or not."""
    built = build(2)
    for rank, (ended_ns, status) in enumerate(zip((3 * 10**9, 2 * 10**9), statuses, strict=True)):
        built[rank].message("all_reduce", 10, 20, seq=0, bytes=4)
        built[rank].info_changes = {"ended_ns": ended_ns, "exit_status": status}
    if hangs_us:
        built[1].message("all_reduce", 1_000_000, 1_000_000 + hangs_us, seq=1, status="failed")
    return built.trace().analyze()


@pytest.mark.parametrize(
    ("statuses", "reported"),
    [
        (
            (143, 137),
            "Rank 1 was killed by SIGKILL, 1.00 s before others: it last recorded message",
        ),
        ((0, 3), "Rank 1 ended with exit status 3, 1.00 s before others: it last recorded message"),
        ((3, 0), "Rank 0 ended with exit status 3: it last recorded message"),
        ((0, 0), None),
    ],
)
def test_the_rank_that_ended_first_in_a_job_that_failed_is_named(build, statuses, reported):
    analysis = _ended(build, statuses)
    if reported is None:
        assert analysis.failure is None
    else:
        assert analysis.failure.at_us == pytest.approx(2e6 if statuses[1] else 3e6, rel=1e-3)
        assert sentences(analysis)[0].startswith(reported)
        assert sentences(analysis)[0].endswith("s before its end.")


def test_no_rank_is_blamed_where_another_left_no_trace(build):
    built = build(2)
    for rank in (0, 1):
        built[rank].message("all_reduce", 10, 20, seq=0, bytes=4)
        ended = {"ended_ns": (3 - rank) * 10**9, "exit_status": 1, "world_size": 3}
        built[rank].info_changes = ended
    assert built.trace().analyze().failure is None


@pytest.mark.parametrize("seen_to_end", [True, False])
@pytest.mark.parametrize(("after_ms", "hangs"), [(300, 0), (3000, 1)])
def test_what_a_killed_rank_may_only_not_have_written_is_no_hang(
    build, seen_to_end, after_ms, hangs
):
    """Rank 1 was killed some time after its last record, in which a message is open."""
    built = build(2)
    for rank in (0, 1):
        for number in range(10):
            start = 1000 * number
            built[rank].message("all_reduce", start, start + 500, seq=number, bytes=4)
    built[0].message("all_reduce", 10_000, 10_500, seq=10, bytes=4)
    built[1].message("all_reduce", 10_000, None, seq=10, bytes=4)
    ended = {"ended_ns": (10 + after_ms) * 10**6, "exit_status": 137}
    built[1].info_changes = {"status": "killed", **(ended if seen_to_end else {})}
    assert len(built.trace().analyze().hangs) == (hangs if seen_to_end else 0)


@pytest.mark.parametrize("waited_s", [0.2, 2])
def test_what_failed_before_a_restart_is_told_of_the_processes_of_then(build, waited_s):
    built = build(2)
    rank_builder = type(built[0])
    for rank in (0, 1):
        segment = segment_name(rank=rank, attempt=1, pid=200 + rank)
        built[rank].message("all_reduce", 6_000_000, 6_000_010, seq=0, bytes=4)
        ended = {"ended_ns": 7 * 10**9, "exit_status": 0}
        built[rank].info_changes = {"attempt": 1, "segment": segment, **ended}
        former = built.ranks[2 + rank] = rank_builder(rank)
        former.add("layer", 10 + rank, 20, name="a")
        former.info_changes = {
            "rank": rank,
            "segment": segment_name(rank=rank, attempt=0, pid=100 + rank),
            "ended_ns": round((1 + waited_s) * 1e9) - 50_000_000 * rank,
            "exit_status": (143, 137)[rank],
        }
    built.ranks[2].message("all_reduce", 1_000_000, None, seq=0, bytes=4)
    analysis = built.trace().analyze()
    failure = analysis.failure
    assert (failure.rank, failure.attempt, failure.doing) == (1, 0, "last recorded layer a")
    assert failure.before_us == pytest.approx(50_000)
    assert sentences(analysis)[0].startswith("Rank 1 of attempt 0 was killed by SIGKILL, 50.0 ms")
    assert len(analysis.hangs) == (waited_s > 1)
    for hang in analysis.hangs:
        assert (hang.entered, hang.missing, hang.waited_us) == ((0,), (1,), 2e6)
        assert hang.doing[1] == "last recorded layer a"


def test_ranks_that_are_ended_together_have_not_failed(build):
    built = build(2)
    for rank in (0, 1):
        built[rank].add("layer", 0, 10, name="a")
        built[rank].info_changes = {"ended_ns": 2 * 10**9 + rank * 10**6, "exit_status": 143}
    assert built.trace().analyze().failure is None


def test_an_end_that_nobody_saw_leaves_open_who_was_first(build):
    assert _ended(build, (143, None)).failure is None  # rank 1 has closed its trace
    built = build(2, "other")
    for rank in (0, 1):
        built[rank].add("layer", 0, 10, name="a")
    built[1].info_changes = {"ended_ns": 2 * 10**9, "exit_status": 137}
    assert built.trace().analyze().failure is None


@pytest.mark.parametrize("waited_us", [500_000, 1_200_000])
def test_a_rank_that_gave_up_waiting_has_hung_and_is_not_to_blame(build, waited_us):
    analysis = _ended(build, (143, 1), hangs_us=waited_us)
    if waited_us < 1_000_000:
        assert (analysis.hangs, analysis.failure.rank) == ((), 1)
    else:
        assert analysis.failure is None
        (hang,) = analysis.hangs
        assert (hang.entered, hang.missing, hang.waited_us) == ((1,), (0,), waited_us)


@pytest.mark.parametrize("spoke_again", [False, True])
def test_ranks_that_all_fell_silent_without_a_message_are_told(build, spoke_again):
    built = build(2)
    for rank in (0, 1):
        built[rank].add("layer", 0, 10, name="a")
        silence = {
            "since_ns": 10_000,
            "noticed_ns": 2_000_010_000,
            "step": None,
            "phase": "other",
            "stack": [f"/job/train.py:{rank} {('load', 'store')[rank]}"],
        }
        built[rank].info_changes = {"status": "killed", "silence": silence}
    if spoke_again:
        built[1].add("layer", 3_000_000, 3_000_010, name="a")
    analysis = built.trace().analyze()
    first = sentences(analysis)[0]
    if spoke_again:
        assert analysis.standstill is None
        assert "No rank" not in first
    else:
        assert analysis.standstill.doing == {
            0: "is at train.py:0 (load), phase other",
            1: "is at train.py:1 (store), phase other",
        }
        assert first.startswith("No rank has recorded anything")
        assert "rank 0 at train.py:0 (load)" in first


def _life(build, steps, sent):
    """The life of one parameter: times of its gradients and messages in each of some steps."""
    built = build(2)
    built.tensors = [TensorInfo(0, "w", (25,), "float32", 100)]
    for number in range(steps):
        for rank in (0, 1):
            one, begin = built[rank], 1000 * number
            one.step = number
            one.add("layer", begin, begin + 100, name="a")
            ready, messages = sent(number)
            for at in ready:
                one.add("gradient", begin + at, begin + at, tensors=[0])
            for place, (op, at) in enumerate(messages):
                seq = 10 * number + place
                one.message(op, begin + at, begin + at + 10, seq=seq, bytes=100, tensors=[0])
            one.whole_step(number, begin, begin + 1000)
    (row,) = built.trace().analyze().tensors
    return row.ready_us, row.enqueue_us, row.complete_us


@pytest.mark.parametrize(
    ("ready", "messages", "life"),
    [
        # Gathered for forward and backward, reduced, gathered again after the update.
        (
            [500],
            [("all_gather", 10), ("all_gather", 300), ("reduce_scatter", 510), ("all_gather", 900)],
            (500, 510, 520),
        ),
        # Reduced within a host, then across.
        ([500], [("reduce_scatter", 510), ("all_reduce", 530)], (500, 510, 540)),
        # Accumulated over passes of which only the last one's sum is sent.
        ([100, 200, 300], [("all_reduce", 310)], (300, 310, 320)),
        # Sent after every pass: the last one counts.
        ([100, 200], [("all_reduce", 110), ("all_reduce", 210)], (200, 210, 220)),
        # Compressed.
        ([500], [("all_gather", 510)], (500, 510, 520)),
        # Sent by a hook that runs before it is added up.
        ([500], [("all_gather", 10), ("all_reduce", 480)], (500, 480, 490)),
        # No gradient was recorded.
        ([], [("all_reduce", 480)], (None, 480, 490)),
    ],
)
def test_the_messages_of_a_gradient_are_those_that_carry_it(build, ready, messages, life):
    assert _life(build, 3, lambda number: (ready, messages)) == pytest.approx(life)


def test_steps_without_a_gradient_of_a_tensor_do_not_count_for_its_life(build):
    def sent(number):
        used = number % 3 == 1
        return ([600] if used else []), [("all_reduce", 650 if used else 100)]

    assert _life(build, 9, sent) == pytest.approx((600, 650, 660))


def test_steps_that_only_some_ranks_completed_are_told(build):
    built = build(2)
    for rank, count in ((0, 3), (1, 2)):
        for number in range(count):
            _ddp_step(built, rank, number, 100 * number)
    analysis = built.trace().analyze()
    assert [row.ranks for row in analysis.steps] == [2, 2, 1]
    assert any("1 of 3 steps" in note for note in analysis.trace.notes)


def test_warmup_ends_when_the_messages_are_those_of_the_later_half(build):
    built = build(1)
    begin = 0.0
    for number in range(16):
        built[0].step = number
        size = 100 if number in (0, 2) else 60
        built[0].message("all_reduce", begin + 1, begin + 5, seq=number, bytes=size)
        built[0].whole_step(number, begin, begin + 10)
        begin += 10
    summary = built.trace().analyze().summary
    assert (summary.warmup_steps, summary.steps) == (3, 13)


def test_device_kernels_are_the_compute_where_they_are_seen(build):
    built = build(1)
    one = built[0]
    one.step = 0
    one.add("phase", 0, 100, name="forward")  # the host launches; not the device's compute
    one.add("kernel", 10, 30, lane="stream-7", name="gemm")
    one.add("kernel", 20, 40, lane="stream-9", name="gemm")
    one.add("copy", 50, 55, lane="stream-7", name="Memcpy HtoD")
    one.message("all_reduce", 35, 48, lane="stream-13", seq=0, bytes=8)
    one.whole_step(0, 0, 100)
    (row,) = built.trace().analyze().ranks
    assert row.compute_us == pytest.approx(30)
    assert row.comm_us == pytest.approx(13)
    assert row.overlap_us == pytest.approx(5)
    assert row.copy_us == pytest.approx(5)
    assert row.span_us == pytest.approx(45)
    assert row.idle_us == pytest.approx(45 - 38 - 5)


def _copying_step(build, names):
    """A step of 10 us of a kernel, then 5 us of each copy."""
    one = (built := build(1))[0]
    for number in range(3):
        at = 200 * number
        one.step = number
        one.add("kernel", at, at + 10, lane="stream-7", name="gemm")
        for place, name in enumerate(names):
            begin = at + 10 + 5 * place
            one.add("copy", begin, begin + 5, lane="stream-7", name=name)
        one.whole_step(number, at, at + 200)
    return built.trace()


COPIES = {
    "Memcpy HtoD (Pinned -> Device)": "host_to_device",
    "Memcpy HtoD (Pageable -> Device)": "host_to_device",
    "CopyDeviceToHost": "device_to_host",
    "Memcpy DtoD (Device -> Device)": "device_to_device",
    "Memcpy PtoP (Device -> Device)": "peer",
    "Memset (Device)": "fill",
    "cudaMemcpy3D": "other",
}


def test_device_copies_are_a_category_by_direction_and_no_data_loading(build):
    analysis = _copying_step(build, COPIES).analyze()
    for row in analysis.steps:
        path = row.critical_path
        assert (path.copy_us, path.data_us, path.compute_us) == (35, 0, 10)
        parts = [getattr(path, f"{name}_us") for name in CATEGORIES]
        assert sum(parts) == pytest.approx(path.total_us) == pytest.approx(row.wall_us)
        wanted = Counter(f"{direction}_us" for direction in COPIES.values())
        assert asdict(row.copies) == {name: 5 * count for name, count in wanted.items()}
    (rank,) = analysis.ranks
    assert (rank.copy_us, rank.data_us) == (3 * 35, 0)
    assert sum(asdict(rank.copies).values()) == rank.copy_us
    assert analysis.summary.data_share == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "pin_memory=True"),
        ("Memcpy DtoH (Device -> Pageable)", ".item()"),
        ("Memcpy DtoD (Device -> Device)", ".clone()"),
        ("Memcpy PtoP (Device -> Device)", "NVLink"),
        ("Memset (Device)", "set_to_none=True"),
    ],
)
def test_advice_on_copies_is_on_their_direction_and_never_on_the_data_loader(build, name, advice):
    analysis = _copying_step(build, [name] * 10).analyze()
    reported = {finding.kind: finding for finding in analysis.findings}
    assert "data" not in reported
    assert advice in reported["copy"].advice
    assert reported["copy"].saves_us == pytest.approx(50)
    assert "device copies" in " ".join(sentences(analysis))


def test_copies_without_kernels_are_on_the_path_of_the_host(build):
    one = (built := build(1))[0]
    one.step = 0
    one.add("phase", 0, 40, name="forward")
    one.add("copy", 30, 60, lane="stream-7", name="Memcpy HtoD")
    one.whole_step(0, 0, 100)
    path = built.trace().analyze().steps[0].critical_path
    assert (path.compute_us, path.copy_us, path.host_us) == (40, 20, 40)


@pytest.mark.parametrize("how", ["flipped", "swapped"])
def test_files_that_are_not_as_they_were_written_are_told(build, how):
    built = build(2)
    for rank in (0, 1):
        for number in range(3):
            _ddp_step(built, rank, number, 100 * number, late=rank)
    path = built.write()
    assert open_trace(path).analyze().trace.status == "complete"
    first, second = sorted(path.glob("rank-*.arrow"))
    if how == "swapped":
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
    else:
        content = bytearray(first.read_bytes())
        # In the footer, which only other readers need: ours would not notice.
        content[-20] ^= 1
        first.write_bytes(content)
    facts = open_trace(path).analyze().trace
    assert facts.status == "partial"
    reported = [note for note in facts.notes if "is not what was recorded" in note]
    assert len(reported) == (2 if how == "swapped" else 1)
