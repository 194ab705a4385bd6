"""What can be known of an emulated network without making one."""

from __future__ import annotations

import os

import pytest

from ddltrace.experiments.network import emulated
from ddltrace.experiments.network.emulated import (
    EmulatedNetwork,
    check_capabilities,
    parse_bandwidth,
)
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
        with pytest.raises(UsageError, match="no rate"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == bits


@pytest.mark.parametrize("hosts", [0, 1, 65])
def test_number_of_hosts_is_checked(hosts: int) -> None:
    with pytest.raises(UsageError, match="--hosts must be 2 to 64"):
        EmulatedNetwork(hosts=hosts, bits_per_second=1)


def test_names_tell_their_owner() -> None:
    made = EmulatedNetwork(hosts=2, bits_per_second=1)
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
