"""What the comparison of transports computes and prints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.transport_benchmark.comparison import (
    Comparison,
    Point,
    Settings,
    TransportResult,
    sizes_up_to,
)
from ddltrace.experiments.transport_benchmark.report import render
from ddltrace.experiments.transports import NAMES, by_name, read
from ddltrace.experiments.transports.backends.mailbox import Key, Mailbox, as_bytes
from ddltrace.experiments.transports.backends.tcp_backend import check_options
from ddltrace.experiments.transports.transport import Tcp
from ddltrace.tracer.errors import MissingCapabilityError, UsageError

KEY = Key(1, 0, 5)


def result(name: str, latency_us: float, us_per_byte: float) -> TransportResult:
    points = tuple(
        Point("ping_pong", size, 2 * (latency_us + size * us_per_byte), 3.0 * size / 1e3, 10)
        for size in (4, 1000, 1_000_000)
    )
    return TransportResult(name, "complete", "", points)


def test_the_fit_finds_latency_and_bandwidth() -> None:
    fit = result("zmq", 50.0, 0.008).fit("ping_pong")
    assert fit is not None
    assert fit.latency_us == pytest.approx(50.0)
    assert fit.gbit_s == pytest.approx(1.0)
    assert result("zmq", 50.0, 0.008).fit("all_reduce") is None


def test_the_table_tells_what_was_measured_and_what_not() -> None:
    settings = Settings(("zmq", "nccl"), 2, (4, 1000, 1_000_000), 10, None, None, 60.0)
    missing = TransportResult("nccl", "unavailable", "the transport nccl needs a GPU for each rank")
    text = render(Comparison(settings, (result("zmq", 50.0, 0.008), missing)))
    (row,) = (line for line in text.splitlines() if line.startswith("zmq"))
    assert row.split() == ["zmq", "50.0", "0.99", "50.0", "1.00", "3.00"]
    assert "nccl: unavailable: the transport nccl needs a GPU" in text
    assert max(map(len, text.splitlines())) <= 100


def test_sizes_end_with_the_largest() -> None:
    assert sizes_up_to(4) == (4,)
    assert sizes_up_to(100) == (4, 16, 64, 100)
    assert sizes_up_to(64) == (4, 16, 64)


def test_each_transport_is_a_technique_of_its_axis() -> None:
    assert NAMES == ("gloo", "mpi", "zmq", "grpc", "ucx", "nccl", "tcp")
    for name in NAMES:
        strategy = parse(f"topk:density=0.01+feedback+{name}")
        assert strategy.transport == by_name(name)
    with pytest.raises(UsageError, match="two techniques on the transport axis"):
        parse("zmq+grpc")


@pytest.mark.parametrize("arrives_first", [True, False])
def test_the_mailbox_matches_by_key_in_order(arrives_first: bool) -> None:
    mailbox, sent = Mailbox(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    into = [torch.zeros(2), torch.zeros(2)]

    def deliver() -> None:
        mailbox.deliver(KEY._replace(tag=6), as_bytes(torch.tensor([9.0, 9.0])))
        for tensor in sent:
            mailbox.deliver(KEY, as_bytes(tensor))

    if arrives_first:
        deliver()
    futures = [mailbox.receive(KEY, tensor) for tensor in into]
    if not arrives_first:
        assert not any(future.done() for future in futures)
        deliver()
    assert [future.wait()[0].tolist() for future in futures] == [[1.0, 2.0], [3.0, 4.0]]


def test_the_mailbox_refuses_another_size() -> None:
    mailbox = Mailbox()
    future = mailbox.receive(KEY, torch.zeros(3))
    mailbox.deliver(KEY, as_bytes(torch.zeros(2)))
    with pytest.raises(RuntimeError, match="8 bytes came instead of 12"):
        future.wait()


def test_the_mailbox_fails_what_awaits_a_rank_that_is_gone() -> None:
    mailbox = Mailbox()
    mailbox.deliver(KEY, as_bytes(torch.ones(1)))
    waiting = mailbox.receive(KEY._replace(tag=7), torch.zeros(1))
    mailbox.lose(1, "rank 1 is gone")
    for future in (waiting, mailbox.receive(KEY._replace(tag=8), torch.zeros(1))):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            future.wait()
    # What had arrived before can still be received.
    assert mailbox.receive(KEY, torch.zeros(1)).wait()[0].item() == 1.0


def test_options_of_tcp_are_read_and_checked() -> None:
    text, transport = read("tcp:nagle=true,connections=4")
    assert text == "tcp:connections=4,nagle=true"
    assert transport == Tcp(nagle=True, connections=4)
    assert parse("ring+tcp:buffer_kb=64").transport == Tcp(buffer_kb=64)
    for wrong in ("tcp:connections=0", "tcp:buffer_kb=-1", "tcp:window=3", "udp"):
        with pytest.raises(UsageError):
            read(wrong)


def test_a_congestion_control_that_the_kernel_lacks_is_named() -> None:
    with pytest.raises(MissingCapabilityError, match="no congestion control 'nope'"):
        check_options(Tcp(congestion="nope"))
    check_options(Tcp(nagle=True))


def test_the_table_says_how_a_profile_was_kept() -> None:
    planned = {"messages": 280, "planned_us": 1000.0, "taken_us": 1100.0, "late": 196}
    spec = "ipoib:slowdown=200"
    paced = replace(result("tcp", 50.0, 0.008), protocol=spec, planned=planned)
    settings = Settings((), 2, (4, 1000, 1_000_000), 10, None, None, 60.0, (spec,))
    text = render(Comparison(settings, (paced,)))
    assert "tcp (paced, profile ipoib:slowdown=200)" in text
    assert "280 messages to rank 0 took 1.100 times as long as planned, 196 over 5 %" in " ".join(
        text.split()
    )
    assert max(map(len, text.splitlines())) <= 80
