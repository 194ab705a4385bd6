from __future__ import annotations

import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.measures.collectives import bus_factor
from ddltrace.analyzer.report.figures import bandwidth_against_size, cost_fits
from ddltrace.analyzer.report.html_report import render


def _collectives(built, sizes, latency, us_per_byte, *, noise=(0.0,), **columns):
    begin, number = 0.0, 0
    for size in sizes:
        for extra in noise:
            end = begin + latency + us_per_byte * size + extra
            for rank in built.ranks:
                built[rank].message(
                    "all_reduce", begin, end, seq=number, bytes=size, out_bytes=size, **columns
                )
            begin, number = end + 10, number + 1


def test_latency_and_bandwidth_are_found(build):
    built = build(4)
    sizes = [1 << power for power in range(10, 22, 2)]
    # One sample of five is disturbed: the medians do not see it.
    _collectives(built, sizes, 60.0, 0.001, noise=(0, 0, 0, 0, 900))
    (fit,) = built.trace().analyze().cost_fits
    assert fit.verdict == "fitted"
    assert (fit.op, fit.group_size, fit.backend, fit.samples) == ("all_reduce", 4, "gloo", 30)
    assert fit.latency_us == pytest.approx(60, abs=0.01)
    assert fit.alpha_us == pytest.approx(10, abs=0.01)
    assert fit.algbw_gbps == pytest.approx(8, rel=1e-3)
    assert fit.busbw_gbps == pytest.approx(8 * 1.5, rel=1e-3)
    assert fit.error < 1e-3
    assert not fit.disturbed


@pytest.mark.parametrize("sizes", [[1000], [1000, 2000, 4000], [1000, 1100, 1200, 1300]])
def test_too_few_sizes_say_so(build, sizes):
    built = build(2)
    _collectives(built, sizes, 60.0, 0.001)
    (fit,) = built.trace().analyze().cost_fits
    assert "too few sizes" in fit.verdict
    assert fit.latency_us is None
    assert fit.busbw_gbps is None


def test_time_that_does_not_grow_is_latency(build):
    built = build(2)
    _collectives(built, [8, 16, 32, 64, 128], 50.0, 0.0)
    (fit,) = built.trace().analyze().cost_fits
    assert fit.latency_us == pytest.approx(50)
    assert fit.algbw_gbps is None


def test_samples_beside_compute_are_left_out_where_others_remain(build):
    built = build(2)
    sizes = [1 << power for power in range(10, 22, 2)]
    _collectives(built, sizes, 60.0, 0.001)
    begin = 1e6
    for number, size in enumerate(sizes):
        for rank in range(2):
            built[rank].add("phase", begin, begin + 50_000, name="backward")
            built[rank].message(
                "all_reduce", begin, begin + 20_000, seq=1000 + number, bytes=size, out_bytes=size
            )
        begin += 60_000
    (fit,) = built.trace().analyze().cost_fits
    assert fit.samples == len(sizes)
    assert fit.latency_us == pytest.approx(60, abs=0.01)


def test_samples_beside_other_messages_are_left_out_where_others_remain(build):
    built = build(2)
    sizes = [1 << power for power in range(10, 22, 2)]
    _collectives(built, sizes, 60.0, 0.001)
    begin = 1e6
    for number, size in enumerate(sizes):
        for other in range(2):  # two at a time: each takes far longer than alone
            for rank in range(2):
                built[rank].message(
                    "all_reduce",
                    begin + other,
                    begin + 30_000 + other,
                    seq=1000 + 2 * number + other,
                    bytes=size,
                    out_bytes=size,
                )
        begin += 60_000
    (fit,) = built.trace().analyze().cost_fits
    assert fit.samples == len(sizes)
    assert not fit.disturbed
    assert fit.latency_us == pytest.approx(60, abs=0.01)


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("broadcast", 1.0)],
)
def test_bus_factors_of_eight_ranks(op, factor):
    assert bus_factor(op, 8) == factor


@pytest.mark.parametrize(
    "operation",
    [
        ("all_reduce", 1, 1, 1, 1.5),
        ("broadcast", 1, 1, 1, 1.0),
        ("reduce", 1, 1, 1, 1.0),
        ("all_gather", 1, 4, 4, 0.75),
        ("reduce_scatter", 4, 1, 4, 0.75),
        ("all_to_all", 4, 4, 4, 0.75),
        ("gather", 1, 4, 4, 0.75),
        ("scatter", 4, 1, 4, 0.75),
    ],
)
def test_recorded_operations_have_the_bandwidths_of_nccl_tests(build, operation):
    """S / t and the factor of nccl-tests' PERFORMANCE.md; parts in and out, and S, in MB."""
    op, given, taken, size, factor = operation
    built = build(4)
    for rank in range(4):
        # Only the root has all parts.
        sent = given if op != "scatter" or rank == 0 else None
        received = taken if op != "gather" or rank == 0 else None
        sizes = {"bytes": sent and sent * 10**6, "out_bytes": received and received * 10**6}
        built[rank].message(op, 0, 400, seq=0, **sizes)
    [row] = built.trace().analyze().collectives
    assert row.algbw_gbps == pytest.approx(size * 8e6 / 400e3)
    assert row.busbw_gbps == pytest.approx(size * 8e6 / 400e3 * factor)


def test_sizes_are_counted_by_powers_of_two_and_once(build):
    built = build(2)
    _collectives(built, [1000, 1023, 1024], 60.0, 0.001)
    built[0].message("send", 0, 5, peer=1, seq=0, tag=0, bytes=7)
    built[1].message("recv", 0, 5, peer=0, seq=0, tag=0, out_bytes=7)
    bins = built.trace().analyze().message_sizes
    found = {(one.op, one.bytes_from): (one.count, one.bytes) for one in bins}
    assert found == {
        ("all_reduce", 512): (2, 2023),
        ("all_reduce", 1024): (1, 1024),
        ("send", 4): (1, 7),
    }


def test_traffic_says_what_is_measured_and_what_is_assumed(build):
    built = build(4)
    _collectives(built, [1000], 60.0, 0.001)
    built[0].message("send", 0, 5, peer=3, seq=0, tag=0, bytes=70)
    built[3].message("recv", 0, 5, peer=0, seq=0, tag=0, out_bytes=70)
    rows = built.trace().analyze().traffic
    ring = {(row.src, row.dst): row.bytes for row in rows if row.assumed == "ring"}
    assert ring == {(0, 1): 1500, (1, 2): 1500, (2, 3): 1500, (3, 0): 1500}
    assert [(row.src, row.dst, row.bytes) for row in rows if row.assumed is None] == [(0, 3, 70)]


def test_the_fit_is_drawn_through_its_points(build):
    built = build(4)
    _collectives(built, [1 << power for power in range(10, 22, 2)], 60.0, 0.001)
    trace = built.trace()
    analysis = trace.analyze()
    points, line = cost_fits(analysis).data
    assert (points.mode, line.mode) == ("markers", "lines")
    assert points.meta["role"] == line.meta["role"]
    assert list(points.x) == [1 << power for power in range(10, 22, 2)]
    assert list(points.y) == pytest.approx([(60 + 0.001 * size) / 1e3 for size in points.x])
    assert (line.x[0], line.x[-1]) == (pytest.approx(1 << 10), pytest.approx(1 << 20))
    assert list(line.y) == pytest.approx([(60 + 0.001 * size) / 1e3 for size in line.x], rel=1e-3)
    page = render(analyze_in_full(trace), trace)
    assert 'data-figure="cost_fits"' in page
    assert "<td>60.0 µs</td><td>10.0 µs</td><td>8.00 Gbit/s</td>" in page


def test_the_limit_of_the_links_is_drawn_above_what_collectives_reach(build):
    built = build(4)
    _collectives(built, [1 << power for power in range(10, 22, 2)], 60.0, 0.001)
    points, limit = bandwidth_against_size(built.trace().analyze()).data
    assert (points.mode, limit.mode, limit.line.dash) == ("markers", "lines", "dash")
    assert (limit.x[0], limit.x[-1]) == (1 << 10, 1 << 20)
    # 8 Gbit/s of data, of which a ring of 4 sends each bit 1.5 times.
    assert list(limit.y) == pytest.approx([12.0, 12.0], rel=1e-3)
    assert max(points.y) < limit.y[0]


def test_without_a_fit_there_are_points_and_the_reason(build):
    built = build(2)
    _collectives(built, [1000, 2000, 4000], 60.0, 0.001)
    trace = built.trace()
    analysis = trace.analyze()
    (points,) = cost_fits(analysis).data
    assert list(points.x) == [1000, 2000, 4000]
    page = render(analyze_in_full(trace), trace)
    assert "too few sizes (3) to tell latency from bandwidth" in page


def test_latency_alone_is_drawn_as_a_level_line(build):
    built = build(2)
    _collectives(built, [8, 16, 32, 64, 128], 50.0, 0.0)
    _, line = cost_fits(built.trace().analyze()).data
    assert list(line.y) == pytest.approx([0.05] * len(line.y))
