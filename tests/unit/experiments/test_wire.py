"""Bytes are counted where the kernel counts them."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from ddltrace.experiments.observation.wire_bytes import tcp_bytes_sent


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's struct tcp_info")
def test_exactly_what_was_sent_over_tcp_is_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as peer,
    ):
        before = tcp_bytes_sent()
        client.sendall(b"x" * 70_001)
        received = 0
        while received < 70_001:
            received += len(peer.recv(1 << 16))
        after = tcp_bytes_sent()
    assert before is not None
    assert after is not None
    assert after - before == 70_001


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's struct tcp_info")
def test_other_sockets_do_not_count() -> None:
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        before = tcp_bytes_sent()
        left.sendall(b"x" * 1000)
        assert tcp_bytes_sent() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's struct tcp_info")
def test_counting_leaves_no_descriptor_open() -> None:
    with open(os.devnull) as _, socket.socketpair()[0]:
        before = len(os.listdir("/proc/self/fd"))
        tcp_bytes_sent()
        assert len(os.listdir("/proc/self/fd")) == before
