"""Profiles of protocols: their sources, and the planned times of messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

from ddltrace.experiments.commands import experiment
from ddltrace.experiments.harness.results import label, summarize
from ddltrace.experiments.harness.results_table import describe
from ddltrace.experiments.strategy.listing import as_json, as_text
from ddltrace.experiments.transports.paced_link import PacedLink
from ddltrace.experiments.transports.protocols import PROTOCOLS, Protocol, Sourced, read_protocol
from ddltrace.tracer.errors import UsageError

PACED = [protocol for protocol in PROTOCOLS if protocol.is_paced]


def numbers(protocol: Protocol) -> list[Sourced]:
    return [
        protocol.latency_us,
        protocol.gbit_s,
        protocol.processor_us_per_message,
        protocol.processor_ns_per_byte,
    ]


def test_each_number_has_a_source_or_is_not_modelled() -> None:
    assert [protocol.name for protocol in PROTOCOLS] == ["tcp", "rdma", "ipoib", "dpdk"]
    for protocol in PACED:
        assert protocol.latency_us.value
        assert protocol.gbit_s.value
        for number in numbers(protocol):
            assert ("not modelled" in number.source) == (number.value is None)
            assert number.value is None or len(number.source) > 40
    assert all(number.value is None for number in numbers(PROTOCOLS[0]))


def test_the_list_has_every_protocol() -> None:
    listed = {entry["name"]: entry for entry in as_json()["protocols"]}
    assert set(listed) == {"tcp", "rdma", "ipoib", "dpdk"}
    assert listed["rdma"]["latency_us"]["value"] == 1.2
    assert "processor per byte: none (no published number found" in as_text()


@pytest.mark.parametrize("protocol", PACED, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("slowdown", [1.0, 250.0])
def test_a_message_on_a_free_link_takes_latency_and_bytes_over_bandwidth(
    protocol: Protocol, slowdown: float
) -> None:
    slowed = replace(protocol, slowdown=slowdown)
    for size in (0, 8, 1_000, 1 << 20):
        sent = PacedLink(slowed).send(500, size)
        expected_us = protocol.latency_us.value + size * 8e-3 / protocol.gbit_s.value
        assert sent.arrival_ns - 500 == pytest.approx(expected_us * 1e3 * slowdown, abs=2)
        assert slowed.planned_ns(size) == pytest.approx(expected_us * 1e3 * slowdown)
        assert PacedLink(slowed).receive(sent.first_ns, size) == sent.arrival_ns


def test_messages_share_the_senders_and_the_receivers_link() -> None:
    protocol = read_protocol("ipoib")
    size, occupied = 701_000, protocol.occupied_ns(701_000)  # 1 ms
    assert occupied == pytest.approx(1e6)
    sender, receiver = PacedLink(protocol), PacedLink(protocol)
    sent = [sender.send(0, size) for _ in range(3)]
    for before, after in pairwise(sent):
        assert after.arrival_ns - before.arrival_ns == pytest.approx(occupied, abs=2)
    # Three senders at once: the receiver's link is the bottleneck.
    firsts = sorted(PacedLink(protocol).send(0, size).first_ns for _ in range(3))
    arrivals = [receiver.receive(first, size) for first in firsts]
    assert arrivals[-1] - firsts[0] == pytest.approx(3 * occupied, abs=3)
    # Later, both links are free again.
    late = sender.send(10**9, size)
    assert receiver.receive(late.first_ns, size) == late.arrival_ns


def test_processor_time_counts_what_is_modelled() -> None:
    assert read_protocol("ipoib").processor_ns(10_000) == 0
    assert read_protocol("rdma:slowdown=2").processor_ns(10_000) == pytest.approx(1270)
    assert read_protocol("dpdk").processor_ns(750) == pytest.approx(180)


@pytest.mark.parametrize(
    "spec", ["roce", "rdma:slowdown=0.5", "rdma:slowdown=x", "rdma:speed=2", "tcp:slowdown=2", ""]
)
def test_a_wrong_protocol_is_one_line(spec: str) -> None:
    with pytest.raises(UsageError, match="--protocol"):
        read_protocol(spec)


@pytest.mark.parametrize("strategy", ["gloo", "wfbp+gloo", "gpipe"])
def test_messages_that_cannot_be_paced_are_refused(strategy: str) -> None:
    options = ["--workload", "gpt", "--protocol", "rdma", "--strategy", strategy]
    result = CliRunner().invoke(experiment, ["run", *options])
    assert isinstance(result.exception, UsageError)
    assert "--protocol cannot pace" in str(result.exception)


def test_rows_are_labelled() -> None:
    assert label(summarize("ddp", [], protocol="rdma:slowdown=9")) == "ddp (paced, profile rdma)"
    assert label(summarize("ddp", [], protocol="tcp")) == "ddp (protocol tcp)"
    assert label(summarize("ddp", [], paced=True)) == "ddp (paced)"
    lines = describe(read_protocol("dpdk:slowdown=40"), layers=True)
    assert lines[1] == (
        "dpdk: 1.15 us + bytes at 75 Gbit/s; processor 0.1 us/message, 0.107 ns/byte"
    )
    assert "messages and layers take 40 times as long" in lines[2]
    for protocol in PROTOCOLS:
        assert max(map(len, describe(protocol, layers=False))) <= 100
