"""What can be known of an emulated network without making one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ddltrace.analyzer.formatting.quantities import parse_bandwidth
from ddltrace.experiments.network import emulated
from ddltrace.experiments.network.emulated import (
    EmulatedNetwork,
    check_capabilities,
)
from ddltrace.experiments.network.topology import SlowHost, Topology, topology
from ddltrace.tracer.errors import MissingCapabilityError, UsageError


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("400mbit", 400_000_000),
        ("2.5Gbit", 2_500_000_000),
        ("64 kbit/s", 64_000),
        ("10Mbps", None),
        ("10mbitps", 10_000_000),
        ("400", None),
        ("0mbit", None),
        ("-1mbit", None),
        ("mbit", None),
    ],
)
def test_parse_bandwidth(text: str, bits: int | None) -> None:
    if bits is None:
        with pytest.raises(UsageError, match="not a rate"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == bits


@pytest.mark.parametrize("hosts", [0, 1, 65])
def test_number_of_hosts_is_checked(hosts: int) -> None:
    with pytest.raises(UsageError, match="--hosts must be 2 to 64"):
        EmulatedNetwork(Topology(hosts, 1))


def test_names_tell_their_owner() -> None:
    made = EmulatedNetwork(Topology(2, 1))
    assert all(f"-{os.getpid()}-" in name for name in made.hosts)
    assert made.addresses == ["10.77.0.1", "10.77.0.2"]
    assert made.command(1, ["true"]) == ["ip", "netns", "exec", made.hosts[1], "true"]


def test_missing_iproute2_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.sys, "platform", "linux")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingCapabilityError, match="install iproute2"):
        check_capabilities()


def test_missing_root_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.sys, "platform", "linux")
    monkeypatch.setattr(emulated.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(emulated.os, "geteuid", lambda: 1000)
    with pytest.raises(MissingCapabilityError, match="sudo"):
        check_capabilities()


def test_racks_have_as_much_to_the_core_as_they_are_given() -> None:
    made = topology(hosts=5, bandwidth="400mbit", hosts_per_rack=2, bandwidth_between="200mbit")
    assert made.racks == [[0, 1], [2, 3], [4]]
    assert {made.rate_of_rack(rack) for rack in range(3)} == {200_000_000}
    full = topology(hosts=5, bandwidth="400mbit", hosts_per_rack=2)
    assert [full.rate_of_rack(rack) for rack in range(3)] == [800_000_000, 800_000_000, 400_000_000]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hosts_per_rack": 4}, "--hosts-per-rack must be 1 to 3"),
        ({"bandwidth_between": "1gbit"}, "needs --hosts-per-rack"),
        ({"slow_host": "host=4,factor=2"}, "numbers 0 to 3"),
        ({"slow_host": "host=1,factor=0.5"}, "factor of at least 1"),
        ({"slow_host": "host=1,factor=2,on=3"}, "cannot be read"),
        ({"slow_host": "1"}, "cannot be read"),
        ({"delay": "2"}, "not a time"),
        ({"loss": "2"}, "not a share"),
        ({"loss": "100%"}, "not a share"),
        ({"ranks_per_host": 0}, "--ranks-per-host"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        topology(hosts=4, bandwidth="400mbit", **options)


def test_options_are_read() -> None:
    made = topology(
        hosts=4, bandwidth="1gbit", slow_host="host=2,factor=4,at=1.5s", delay="500us", loss="0.1%"
    )
    assert made.slow_host == SlowHost(2, 4, 1.5)
    assert (made.delay_seconds, made.loss_percent) == (500e-6, 0.1)
    assert made.rate_of(2, slowed=True) == 250_000_000
    assert made.rate_of(2, slowed=False) == made.rate_of(1, slowed=True) == 1_000_000_000
