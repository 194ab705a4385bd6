from __future__ import annotations

import shlex
import shutil
from dataclasses import replace

import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.trace.align import EXCHANGED, SHARED, align
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_files import write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.schema import EVENTS


def test_events_are_sorted_by_start_whatever_the_order_of_recording(build):
    built = build(1)
    built[0].add("phase", 10, 20, name="forward")
    built[0].add("phase", 0, 30, name="backward")
    table = built.trace().events(0)
    assert table.schema.equals(EVENTS)
    assert table["start_ns"].to_pylist() == [0, 10_000]


def test_an_open_message_is_replaced_by_its_completion_only(build):
    built = build(1)
    done = built[0].message("all_reduce", 0, None)
    still_open = built[0].message("barrier", 5, None)
    built[0].message("all_reduce", 0, 9, id=done)
    table = built.trace().events(0)
    assert table["id"].to_pylist() == [done, still_open]
    assert table["end_ns"].to_pylist() == [9_000, None]
    assert table["status"].to_pylist() == ["ok", "open"]


def test_a_running_trace_opens(build):
    built = build(2)
    built[1].add("phase", 3, 4, name="forward")
    trace = open_trace(built.write(final=False))
    assert trace.ranks == [0, 1]
    assert trace.events(1).num_rows == 1
    assert trace.origin_ns == 3_000


def test_a_lost_event_file_leaves_an_empty_rank_and_a_note(build):
    path = build(2).write()
    next(path.glob("rank-00001*.arrow")).unlink()
    trace = open_trace(path)
    assert trace.events(1).num_rows == 0
    assert any("rank 1" in note for note in trace.notes)


def test_no_trace_is_told_in_one_line(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        open_trace(tmp_path / "nothing")


@pytest.mark.parametrize(("count", "says"), [(1, "a trace"), (2, "2 traces"), (9, "9 traces")])
def test_a_directory_of_traces_leads_to_them(build, tmp_path, count, says):
    outer = tmp_path / "two words"
    outer.mkdir()
    path = build(1).write()
    for number in range(count):
        shutil.copytree(path, outer / f"run-{number}")
    with pytest.raises(TraceError, match=f"holds {says} ") as caught:
        open_trace(outer)
    command = str(caught.value).partition("with: ")[2].rstrip(")")
    named = shlex.split(command)[2:]
    assert named == [str(outer / f"run-{number}") for number in range(min(count, 8))]
    assert ("first 8" in str(caught.value)) == (count > 8)
    for trace in named:
        assert open_trace(trace).ranks == [0]


def test_a_restarted_rank_keeps_steps_groups_and_ids_apart(build, tmp_path):
    built = build(1)
    built[0].whole_step(0, 0, 10)
    built[0].wait(2, 4, built[0].message("all_reduce", 1, 4, seq=0, step=0))
    again = build(1, "again")
    again[0].whole_step(0, 100, 110)
    again[0].wait(102, 104, again[0].message("all_reduce", 101, 104, seq=0, step=0))
    path, other = built.write(final=False), again.write(final=False)
    info = replace(read_run(other).ranks[0], attempt=1, segment="rank-00000-1-100")
    shutil.copy(other / "rank-00000-0-100.arrows", path / "rank-00000-1-100.arrows")
    write_sidecar(path, info)

    trace = open_trace(path)
    messages = [row for row in trace.events(0).to_pylist() if row["kind"] == "message"]
    waits = [row for row in trace.events(0).to_pylist() if row["kind"] == "wait"]
    assert [row["step"] for row in messages] == [0, 1]
    assert [row["group"] for row in messages] == ["0", "0@2"]
    assert [row["parent"] for row in waits] == [row["id"] for row in messages]
    assert trace.group_ranks("0@2") == (0,)


def _run_with_samples(samples, domain="other"):
    zero = RankInfo(0, "rank-00000-0-1", clock_domain="boot")
    one = RankInfo(1, "rank-00001-0-2", clock_domain=domain, clock={"samples": samples})
    return RunInfo(ranks=[zero, one])


def test_one_clock_domain_needs_no_correction():
    clock = align(_run_with_samples([], domain="boot"))["rank-00001-0-2"]
    assert (clock.offset_ns, clock.residual_ns, clock.method) == (0, 0.0, SHARED)


def test_offset_and_drift_are_found_and_the_residual_covers_the_error():
    # True clock: offset 2 s at local 0, drifting by +50 ppm; exchanges are off by +-20 us,
    # some of them disturbed with a long round trip.
    samples = []
    for number in range(20):
        local = number * 10**9
        true = 2 * 10**9 + local * 50 // 10**6
        slow = number % 5 == 2
        error = 900_000 if slow else (20_000 if number % 2 else -20_000)
        samples.append(
            {"local_ns": local, "offset_ns": true + error, "rtt_ns": 2_000_000 if slow else 60_000}
        )
    clock = align(_run_with_samples(samples))["rank-00001-0-2"]
    assert clock.method == EXCHANGED
    assert clock.drift == pytest.approx(50e-6, abs=2e-6)
    for local in (0, 10 * 10**9, 19 * 10**9):
        found = clock.offset_ns + clock.drift * (local - clock.reference_ns)
        true = 2 * 10**9 + local * 50 / 10**6
        assert abs(found - true) <= clock.residual_ns < 100_000


def test_damaged_samples_are_left_out():
    good = {"local_ns": 0, "offset_ns": 5_000, "rtt_ns": 100}
    bad = [None, {}, {"local_ns": "x", "offset_ns": 1, "rtt_ns": 1}, {**good, "rtt_ns": -1}]
    clock = align(_run_with_samples([*bad, good]))["rank-00001-0-2"]
    assert clock.offset_ns == 5_000


def test_an_unknown_offset_is_said_to_be_unknown():
    clock = align(_run_with_samples([]))["rank-00001-0-2"]
    assert clock.residual_ns is None
