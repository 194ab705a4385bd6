"""Clock corrections from exchanges and messages, against clocks whose truth is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltrace.analyzer.trace import align as alignment
from ddltrace.analyzer.trace import clock_bounds
from ddltrace.analyzer.trace.align import align, worst_residual
from ddltrace.analyzer.trace.clock_fit import Bounds, fit_broken_line, fit_line
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS

SECOND = 1_000_000_000


def samples_of(truth, times, rtts, skew):
    """Exchanges of a clock whose offset is `truth(t)`; `skew` in -1..1 places the error."""
    return [
        {
            "local_ns": int(t),
            "offset_ns": round(float(truth(t)) + s * r / 2),
            "rtt_ns": int(r),
        }
        for t, r, s in zip(times, rtts, skew, strict=True)
    ]


def info(rank, domain, *, pid=None, attempt=0, samples=None, groups=()):
    pid = pid or 10 + rank
    return RankInfo(
        rank,
        f"rank-{rank:05d}-{attempt}-{pid}",
        world_size=4,
        attempt=attempt,
        pid=pid,
        clock_domain=domain,
        clock={"samples": samples} if samples is not None else {},
        groups=list(groups),
    )


def events(rows):
    complete = [
        {
            "kind": "message",
            "op": "all_reduce",
            "group": "0",
            "status": "ok",
            "bytes": 8,
            "enqueue_ns": row["start_ns"],
            **row,
        }
        for row in rows
    ]
    columns = {f.name: [row.get(f.name) for row in complete] for f in EVENTS}
    return pa.table(columns, schema=EVENTS)


@settings(deadline=None, max_examples=60)
@given(
    offset=st.integers(-(10**18), 10**18),
    ppm=st.floats(-300, 300),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 60),
)
def test_the_residual_covers_the_error_at_every_time(offset, ppm, seed, count):
    draw = np.random.default_rng(seed)
    times = np.sort(draw.integers(0, 600 * SECOND, count))
    rtts = draw.lognormal(np.log(50_000), 1.0, count)

    def truth(t):
        return offset + ppm * 1e-6 * t

    run = RunInfo(
        ranks=[
            info(0, "a"),
            info(1, "b", samples=samples_of(truth, times, rtts, draw.uniform(-1, 1, count))),
        ]
    )
    clock = align(run)["rank-00001-0-11"]
    probes = np.linspace(times[0], times[-1], 50).astype(np.int64)
    # The truth in whole numbers: floats of 10**18 ns would be off by 128 ns.
    true = np.array([int(t) + offset + round(ppm * 1e-6 * int(t)) for t in probes])
    error = np.abs((clock.apply(probes) - true).astype(float)).max()
    assert error <= clock.residual_ns + 2
    # Never worse than what half the best round trip and the spread of the exchanges allow.
    assert clock.method == alignment.EXCHANGED


def test_good_exchanges_give_a_residual_of_about_half_their_round_trip():
    draw = np.random.default_rng(7)
    times = np.arange(0, 100 * SECOND, 10 * SECOND)

    def truth(t):
        return 5 * SECOND - 50e-6 * t

    rtts = np.full(len(times), 60_000.0)
    run = RunInfo(
        ranks=[
            info(0, "a"),
            info(1, "b", samples=samples_of(truth, times, rtts, draw.uniform(-0.2, 0.2, 10))),
        ]
    )
    clock = align(run)["rank-00001-0-11"]
    assert clock.drift == pytest.approx(-50e-6, abs=1e-6)
    assert clock.residual_ns <= 30_000 + 5_000 + 1_000
    assert worst_residual(list(align(run).values())) == clock.residual_ns


def test_one_slow_exchange_spoils_nothing():
    def truth(t):
        return 3 * SECOND

    times = np.arange(0, 50 * SECOND, 5 * SECOND)
    rtts = np.full(10, 40_000.0)
    good = samples_of(truth, times, rtts, np.zeros(10))
    slow = samples_of(truth, [12 * SECOND], [80_000_000], [0.9])
    clocks = [
        align(RunInfo(ranks=[info(0, "a"), info(1, "b", samples=s)]))["rank-00001-0-11"]
        for s in (good, good + slow)
    ]
    assert clocks[0].offset_ns == clocks[1].offset_ns
    assert clocks[0].residual_ns == pytest.approx(clocks[1].residual_ns)


def test_a_clock_that_is_corrected_while_the_job_runs_gets_a_broken_line():
    """NTP slews by 100 ppm for a while: no straight line passes through the exchanges."""

    def truth(t):
        return 1e-4 * np.clip(t - 200 * SECOND, 0, 100 * SECOND)

    times = np.arange(0, 600 * SECOND, 10 * SECOND)
    samples = samples_of(truth, times, np.full(60, 50_000.0), np.zeros(60))
    run = RunInfo(ranks=[info(0, "a"), info(1, "b", samples=samples)])
    clock = align(run)["rank-00001-0-11"]
    probes = np.linspace(0, 590 * SECOND, 1000).astype(np.int64)
    moved = clock.apply(probes)
    error = np.abs(moved - probes - truth(probes)).max()
    assert error <= clock.residual_ns < 1_100_000
    assert (np.diff(moved) > 0).all()


def test_a_residual_is_a_plain_number():
    """Numpy's scalars compare to numpy's truth, which JSON does not know."""
    times = np.arange(0, 60 * SECOND, 10 * SECOND)
    jumping = samples_of(
        lambda t: np.where(t < 30 * SECOND, 0, 5e9), times, np.full(6, 9e3), [0] * 6
    )
    run = RunInfo(ranks=[info(0, "a"), info(1, "b", samples=jumping)])
    assert type(align(run)["rank-00001-0-11"].residual_ns) is float


def test_a_jump_of_a_clock_is_covered_by_the_residual():
    def truth(t):
        return np.where(t < 100 * SECOND, 0.0, 5.0 * SECOND)

    times = np.arange(5 * SECOND, 200 * SECOND, 10 * SECOND)
    samples = samples_of(truth, times, np.full(len(times), 50_000.0), np.zeros(len(times)))
    bounds = alignment._samples(samples)
    fit = fit_broken_line(bounds, int(times[0]), int(times[-1]))
    probes = np.linspace(times[0], times[-1], 500).astype(np.int64)
    error = np.abs(fit.relative(probes) + fit.base - truth(probes)).max()
    assert error <= fit.residual


def test_a_rank_that_claims_a_clock_it_does_not_share_is_found_out():
    """Two hosts started from one snapshot have the same boot id."""

    def truth(t):
        return 7 * SECOND

    apart = samples_of(truth, [0, 10 * SECOND], [50_000, 50_000], [0.1, -0.1])
    shared = samples_of(lambda t: 0, [0], [50_000], [0.9])
    run = RunInfo(ranks=[info(0, "a"), info(1, "a", samples=apart), info(2, "a", samples=shared)])
    clocks = align(run)
    assert abs(clocks["rank-00001-0-11"].offset_ns - 7 * SECOND) <= 25_000
    assert clocks["rank-00001-0-11"].method == alignment.EXCHANGED
    assert clocks["rank-00002-0-12"].method == alignment.SHARED


def test_two_hosts_with_one_boot_id_beside_rank_zeros_are_told_apart():
    times = np.arange(0, 40 * SECOND, 10 * SECOND)
    leader = samples_of(lambda t: SECOND, times, np.full(4, 50_000.0), np.zeros(4))
    same = samples_of(lambda t: SECOND, [1000], [60_000], [0.5])
    other = samples_of(lambda t: 2 * SECOND, [1000], [60_000], [0.5])
    run = RunInfo(
        ranks=[
            info(0, "a"),
            info(1, "b", samples=leader),
            info(2, "b", samples=same),
            info(3, "b", samples=other),
        ]
    )
    clocks = align(run)
    assert abs(clocks["rank-00002-0-12"].offset_ns - SECOND) <= 25_000
    assert abs(clocks["rank-00003-0-13"].offset_ns - 2 * SECOND) <= 30_000


def test_without_rank_0_others_meet_on_the_clock_that_they_exchanged_times_with():
    times = np.arange(0, 40 * SECOND, 10 * SECOND)
    one = samples_of(lambda t: SECOND, times, np.full(4, 50_000.0), np.zeros(4))
    two = samples_of(lambda t: 3 * SECOND, times, np.full(4, 50_000.0), np.zeros(4))
    run = RunInfo(ranks=[info(1, "b", samples=one), info(2, "c", samples=two), info(3, "unknown")])
    clocks = align(run)
    apart = clocks["rank-00002-0-12"].offset_ns - clocks["rank-00001-0-11"].offset_ns
    assert abs(apart - 2 * SECOND) <= 50_000
    assert 0 < clocks["rank-00002-0-12"].residual_ns <= 30_000
    assert clocks["rank-00003-0-13"].residual_ns is None


def test_without_rank_0_and_exchanges_nothing_is_sure():
    run = RunInfo(ranks=[info(1, "b"), info(2, "c")])
    clocks = align(run)
    assert clocks["rank-00001-0-11"].residual_ns == 0
    assert clocks["rank-00002-0-12"].residual_ns is None
    assert worst_residual(list(clocks.values())) is None
    shared = align(RunInfo(ranks=[info(1, "b"), info(2, "b")]))
    assert worst_residual(list(shared.values())) == 0
    assert align(RunInfo()) == {}


def test_ranks_without_exchanges_use_those_of_their_clock():
    times = np.arange(0, 40 * SECOND, 10 * SECOND)
    samples = samples_of(lambda t: SECOND, times, np.full(4, 50_000.0), np.zeros(4))
    run = RunInfo(ranks=[info(0, "a"), info(1, "b", samples=samples), info(2, "b")])
    clocks = align(run)
    one, two = clocks["rank-00001-0-11"], clocks["rank-00002-0-12"]
    assert (one.offset_ns, one.residual_ns) == (two.offset_ns, two.residual_ns)
    assert (one.rank, two.rank) == (1, 2)


def test_a_restart_that_moves_rank_0_to_another_host_is_followed():
    """Attempt 0: rank 0 on host a. Attempt 1: rank 0 on host b, rank 1 on host c."""
    a_to_b = samples_of(lambda t: -SECOND, [100], [20_000], [0.0])
    c_to_b = samples_of(lambda t: 5 * SECOND, [200, 10 * SECOND], [20_000, 20_000], [0.0, 0.0])
    run = RunInfo(
        ranks=[
            info(0, "a"),
            info(0, "b", attempt=1, pid=50),
            info(1, "c", attempt=1, pid=51, samples=c_to_b),
            info(2, "a", attempt=1, pid=52, samples=a_to_b),
        ]
    )
    clocks = align(run)
    assert clocks["rank-00000-0-10"].offset_ns == 0
    # a + (-1 s) = b, so b + 1 s = a; c + 5 s = b, so c + 6 s = a.
    assert abs(clocks["rank-00000-1-50"].offset_ns - SECOND) <= 10_001
    assert abs(clocks["rank-00001-1-51"].offset_ns - 6 * SECOND) <= 30_000
    assert clocks["rank-00001-1-51"].residual_ns >= 10_000


def collectives(offset, *, count=50, length=200_000):
    """All-reduces of two ranks; the second one's clock is `offset` behind."""
    draw = np.random.default_rng(3)
    zero, one = [], []
    for seq in range(count):
        arrivals = seq * SECOND + draw.integers(0, 5 * length, 2)
        end = arrivals.max() + length // 2 + draw.integers(0, 1000, 2)
        zero.append({"start_ns": int(arrivals[0]), "end_ns": int(end[0]), "seq": seq})
        one.append(
            {"start_ns": int(arrivals[1] - offset), "end_ns": int(end[1] - offset), "seq": seq}
        )
    return events(zero), events(one)


def reader(tables):
    """Reads the times of processes, whose events are in a table for each rank."""
    return lambda infos: [
        clock_bounds.process_times(info, [tables[info.rank]], 0) for info in infos
    ]


def test_the_times_of_messages_do_not_grow_with_their_group():
    table, _ = collectives(0)
    sizes = []
    for ranks in (2, 4096):
        group = GroupInfo("0", "default", "gloo", tuple(range(ranks)))
        times = clock_bounds.process_times(info(0, "a", groups=[group]), [table], 0)
        sizes.append(times.messages.starts.nbytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("offset", [0, 3 * SECOND, -(10**18)])
def test_messages_alone_align_two_clocks(offset):
    zero, one = collectives(offset)
    run = RunInfo(ranks=[info(0, "a"), info(1, "b")])
    tables = dict(zip((0, 1), (zero, one), strict=True))
    clock = align(run, reader(tables))["rank-00001-0-11"]
    assert clock.method == alignment.MESSAGES
    found = clock.apply(one["start_ns"].to_numpy())
    error = np.abs(found - (one["start_ns"].to_numpy() + offset)).max()
    assert error <= clock.residual_ns < 1_000_000


def test_messages_narrow_what_exchanges_leave_open():
    zero, one = collectives(2 * SECOND)
    slow = samples_of(lambda t: 2 * SECOND, [0, 40 * SECOND], [40_000_000] * 2, [0.8, -0.8])
    run = RunInfo(ranks=[info(0, "a"), info(1, "b", samples=slow)])
    tables = dict(zip((0, 1), (zero, one), strict=True))
    without = align(run)["rank-00001-0-11"]
    clock = align(run, reader(tables))["rank-00001-0-11"]
    assert clock.method == alignment.REFINED
    assert clock.residual_ns < without.residual_ns / 10
    error = np.abs(clock.apply(one["start_ns"].to_numpy()) - one["start_ns"].to_numpy())
    assert np.abs(error - 2 * SECOND).max() <= clock.residual_ns


def test_messages_that_contradict_the_exchanges_make_the_clock_unsure():
    zero, one = collectives(2 * SECOND + 5_000_000)
    samples = samples_of(lambda t: 2 * SECOND, [0, 40 * SECOND], [40_000] * 2, [0, 0])
    run = RunInfo(ranks=[info(0, "a"), info(1, "b", samples=samples)])
    tables = dict(zip((0, 1), (zero, one), strict=True))
    clock = align(run, reader(tables))["rank-00001-0-11"]
    assert clock.method == alignment.EXCHANGED
    assert clock.residual_ns >= 4_000_000


def test_a_receive_does_not_end_before_its_send():
    bounds = []
    for shift in (0, 50_000):
        sends = [
            {"start_ns": n * SECOND, "end_ns": n * SECOND + 9, "op": "send", "peer": 1, "seq": n}
            for n in range(5)
        ]
        receives = [
            {
                "start_ns": n * SECOND - 1,
                "end_ns": n * SECOND + 100 - shift,
                "op": "recv",
                "peer": 0,
                "seq": n,
            }
            for n in range(5)
        ]
        back = [{**row, "op": "send", "peer": 0, "seq": row["seq"]} for row in receives]
        back_received = [
            {**row, "op": "recv", "peer": 1, "end_ns": row["start_ns"] + 90_000} for row in sends
        ]
        tables = {0: events(sends + back_received), 1: events(receives + back)}
        run = RunInfo(ranks=[info(0, "a"), info(1, "b")])
        bounds.append(align(run, reader(tables))["rank-00001-0-11"])
    low, high = -100, 90_001
    assert bounds[0].method == alignment.MESSAGES
    assert bounds[0].offset_ns == pytest.approx((low + high) / 2, abs=2)
    assert bounds[1].offset_ns == pytest.approx((low + 50_000 + high) / 2, abs=2)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 40))
def test_every_line_through_all_intervals_lies_within_the_residual(seed, count):
    """The fit against a plain search over random lines."""
    draw = np.random.default_rng(seed)
    x = np.sort(draw.integers(0, 100 * SECOND, count))
    first, last = 0, 100 * SECOND  # over which no line drawn here drifts more than clocks do
    line = draw.normal(0, 1e5, 2)

    def at(ends, t):
        share = (t - first) / (last - first)
        return ends[0] * (1 - share) + ends[1] * share

    half = draw.uniform(1e3, 1e5, count)
    skew = draw.uniform(-1, 1, count) * half
    bounds = Bounds(x, at(line, x) + skew - half, at(line, x) + skew + half, 0)
    fit = fit_line(bounds, first, last)
    assert fit is not None
    tries = line + draw.normal(0, 3e4, (2000, 2))
    values = tries[:, :1] * (1 - (x - first) / (last - first)) + tries[:, 1:] * (
        (x - first) / (last - first)
    )
    fitting = tries[((values >= bounds.low) & (values <= bounds.high)).all(axis=1)]
    for ends in [line, *fitting]:
        assert np.abs(ends - fit.y).max() <= fit.residual + 1


def test_rows_have_a_number_in_common_if_they_are_of_one_message() -> None:
    rng = np.random.default_rng(0)
    extremes = np.array([-(2**63), -1, 0, 5, 2**63 - 1])
    words = np.array(["", "0", "(0, 1)"])
    for large in (False, True):
        columns: dict[str, pa.Array] = {}
        for name in ("generation", "seq", "source", "destination", "tag"):
            values = rng.choice(extremes, 300) if large else rng.integers(0, 3, 300)
            columns[name] = pa.array(values)
        for name in ("members", "group", "op"):
            columns[name] = pa.array(rng.choice(words, 300))
        table = pa.table(columns)
        keys = clock_bounds._keys(pa.concat_tables([table[:100], table[100:]]))
        rows = [tuple(row[name] for name in clock_bounds._KEY) for row in table.to_pylist()]
        assert len(set(zip(rows, keys.tolist(), strict=True))) == len(set(rows))
        assert len(set(keys.tolist())) == len(set(rows))
