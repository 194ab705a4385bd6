"""TCP connections between hosts, from the counters of both ends."""

from __future__ import annotations

import pytest

from ddltrace.analyzer.measures.connections import (
    ConnectionRow,
    connection_rows,
    slow_connections,
)
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import counters_name, segment_name

MIB = 1 << 20


def readings(instance, *samples):
    """Rows of a connection; a sample is its bytes, seconds and segments so far."""
    names = ("connection_sent", "connection_busy", "connection_retransmits")
    return [
        (number * 1_000_000, None, Reading(name, value, instance))
        for number, sample in enumerate(samples)
        for name, value in zip(names, sample, strict=True)
    ]


def written(build, rows, hosts):
    """A trace of one rank on each host, with these rows of counters."""
    built = build(len(hosts))
    for rank, host in enumerate(hosts):
        built[rank].info_changes["host"] = host
        built[rank].whole_step(0, 0, 1000)
    path = built.write()
    for rank in range(len(hosts)):
        segment = segment_name(rank=rank, attempt=0, pid=100 + rank)
        stream = StreamWriter(path / f"{counters_name(segment)}.arrows", COUNTERS)
        stream.write(CounterRows().batch(rows.get(rank, readings("0f>", (0, 0, 0)))))
        stream.close()
    return open_trace(path)


def test_the_rate_is_that_between_the_readings(build):
    rows = {
        0: readings("aa<", (10 * MIB, 5.0, 7), (20 * MIB, 5.5, 7), (30 * MIB, 6.0, 9)),
        1: readings("aa>", (5 * MIB, 0.25, 0)),  # read once: since it was opened
    }
    slow, fast = connection_rows(written(build, rows, ["a", "b"]))
    assert (slow.src, slow.dst, slow.src_host, slow.dst_host) == (0, 1, "a", "b")
    assert (slow.bytes, slow.busy_us, slow.retransmits) == (20 * MIB, 1e6, 2)
    assert slow.rate_gbps == pytest.approx(20 * MIB * 8 / 1e9)
    assert (fast.src, fast.bytes, fast.retransmits) == (1, 5 * MIB, 0)


def test_connections_of_one_pair_are_one_row(build):
    sums = {
        "aa": ((0, 0.0, 0), (10 * MIB, 1.0, 1)),
        "bb": ((0, 0.0, 0), (30 * MIB, 1.0, 2)),
    }
    rows = {
        0: [row for name, samples in sums.items() for row in readings(f"{name}>", *samples)],
        1: [row for name in sums for row in readings(f"{name}<", (0, 0.0, 0), (9, 0.0, 0))],
    }
    (row,) = connection_rows(written(build, rows, ["a", "b"]))
    assert (row.bytes, row.busy_us, row.retransmits) == (40 * MIB, 2e6, 3)


@pytest.mark.parametrize(
    ("others", "hosts"),
    [
        ({1: "aa<"}, ["a", "a", "c"]),  # on one host
        ({}, ["a", "b", "c"]),  # the other end is no rank
        ({1: "aa>"}, ["a", "b", "c"]),  # both name one direction: equal addresses on two hosts
        ({1: "aa<", 2: "aa<"}, ["a", "b", "c"]),
    ],
)
def test_what_is_no_connection_between_two_hosts_is_left_out(build, others, hosts):
    samples = ((0, 0.0, 0), (10 * MIB, 1.0, 0))
    rows = {rank: readings(name, *samples) for rank, name in {0: "aa>", **others}.items()}
    assert connection_rows(written(build, rows, hosts)) == ()


def ring(hosts, slow, rate=0.1):
    """Each host sends to the next one; connections of which `slow` is true have a tenth."""
    return [
        ConnectionRow(
            src=number,
            dst=(number + 1) % hosts,
            src_host=f"h{number}",
            dst_host=f"h{(number + 1) % hosts}",
            bytes=MIB,
            busy_us=1e5,
            rate_gbps=rate if slow(number, (number + 1) % hosts) else 1.0 + number / 100,
            retransmits=0,
        )
        for number in range(hosts)
    ]


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_the_host_of_all_slow_connections_is_named(hosts):
    found = slow_connections(ring(hosts, lambda src, dst: 2 in (src, dst)))
    assert found is not None
    assert found.host == "h2"
    assert {(row.src, row.dst) for row in found.rows} == {(1, 2), (2, 3 % hosts)}
    assert found.usual_gbps > 0.5


def test_of_one_slow_connection_either_end_may_be_the_cause():
    found = slow_connections(ring(4, lambda src, _: src == 2))
    assert found is not None
    assert found.host is None
    assert len(found.rows) == 1


def test_slow_connections_of_several_hosts_have_none_in_common():
    found = slow_connections(ring(16, lambda src, _: src in {2, 9}))
    assert found is not None
    assert found.host is None
    assert len(found.rows) == 2


def test_nothing_is_slow_among_equal_connections_or_of_two():
    assert slow_connections(ring(4, lambda *_: False)) is None
    assert slow_connections(ring(4, lambda *_: True)) is None
    assert slow_connections(ring(4, lambda src, _: src == 2, rate=0.6)) is None
    assert slow_connections(ring(2, lambda src, _: src == 1)) is None
    assert slow_connections([]) is None
