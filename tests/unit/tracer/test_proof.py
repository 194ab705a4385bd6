"""The proof of a job's secret: who gets through, who does not, and what strangers cost."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ddltrace.tracer.connections import proof
from ddltrace.tracer.connections.addresses import LOOPBACK
from ddltrace.tracer.connections.proof import ProvenListener, connect_proven

SECRET = secrets.token_bytes(proof.SECRET_BYTES)
PURPOSE = "test"


@contextmanager
def listening(*numbers: int) -> Iterator[tuple[ProvenListener, dict[int, bytes]]]:
    """A listener, and what comes first from one connection of each number."""
    listener = ProvenListener(LOOPBACK, SECRET, PURPOSE)
    came: dict[int, bytes] = {}

    def accept() -> None:
        for number, connection in listener.accept_each(numbers, 60):
            with connection:
                came[number] = connection.recv(99)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener, came
        thread.join(60)
    finally:
        listener.close()


def connect(listener: ProvenListener, number: int = 1, timeout_s: float = 30) -> socket.socket:
    return connect_proven(listener.place, SECRET, PURPOSE, number=number, timeout_s=timeout_s)


def test_both_ends_prove_the_secret_and_lose_no_byte() -> None:
    with listening(1, 2) as (listener, came):
        for number in (2, 1):
            with connect(listener, number) as line:
                line.sendall(f"data of {number}".encode())
    assert came == {1: b"data of 1", 2: b"data of 2"}


@pytest.mark.parametrize(
    ("secret", "purpose", "number"),
    [(bytes(32), PURPOSE, 1), (SECRET, "another", 1), (SECRET, PURPOSE, 7)],
    ids=["secret", "purpose", "number"],
)
def test_another_secret_purpose_or_number_is_refused(
    secret: bytes, purpose: str, number: int
) -> None:
    before = proof.refused.count
    with listening(1) as (listener, came):
        with suppress(OSError):
            line = connect_proven(listener.place, secret, purpose, number=number, timeout_s=0.2)
            assert line.recv(1) == b""  # of a number that is not expected: proven, then closed
            line.close()
        assert came == {}
        assert proof.refused.count > before
        connect(listener).close()
    assert list(came) == [1]


def test_a_recorded_exchange_is_worth_nothing() -> None:
    with listening(1) as (listener, _):
        recorded = _record(listener)
    with listening(1) as (listener, came):
        with socket.create_connection(listener.place, 10) as stranger:
            stranger.sendall(recorded)
            while stranger.recv(4096):  # the greeting, and then the end
                pass
        assert came == {}
        connect(listener).close()


def test_a_server_without_the_secret_gets_nothing() -> None:
    with socket.create_server((LOOPBACK, 0)) as false:
        false.settimeout(5)
        heard: list[bytes] = []

        def answer() -> None:
            with suppress(OSError):
                while True:
                    line, _ = false.accept()
                    with line:
                        line.sendall(b"ddltrace proof 1" + bytes(32))
                        heard.append(line.recv(4096))
                        line.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError):
            connect_proven(false.getsockname(), SECRET, PURPOSE, number=1, timeout_s=0.3)
        false.close()
        thread.join(10)
    # Of the secret, only codes over nonces of this connection.
    assert heard
    assert all(SECRET not in data and len(data) == 88 for data in heard)


def test_idle_strangers_hold_few_descriptors_and_the_job_gets_through() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    strangers = 150
    with ExitStack() as stack, listening(1) as (listener, came):
        # Beside the strangers' own ends, 80 more files may be opened: fewer than they would take.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + strangers + 2 + 80, hard))
        try:
            for _ in range(strangers):
                stack.enter_context(socket.create_connection(listener.place, 30))
            connect(listener).close()
            for _ in range(40):
                stack.enter_context(Path(os.devnull).open("rb"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(came) == [1]


@pytest.mark.parametrize(
    "send",
    [
        lambda line: None,
        lambda line: line.sendall(b"bye"),
        lambda line: line.sendall(b"\0\0\0\4"),
        lambda line: line.sendall(b"\xff" * 100_000),
        lambda line: line.sendall(b"ddltrace proof 1" + bytes(20)),
        lambda line: line.sendall(b"ddltrace proof 2" + bytes(72)),
    ],
)
def test_whatever_strangers_send_the_job_is_next(send: Callable[[socket.socket], object]) -> None:
    with listening(1) as (listener, came):
        for _ in range(20):
            with suppress(OSError), socket.create_connection(listener.place, 10) as stranger:
                send(stranger)
        connect(listener).close()
    assert list(came) == [1]


def _record(listener: ProvenListener) -> bytes:
    """What a rank sends to prove itself, as seen on the network by a relay."""
    sent = bytearray()
    with socket.create_server((LOOPBACK, 0)) as relay:

        def forward() -> None:
            line, _ = relay.accept()
            with line, socket.create_connection(listener.place, 10) as onward:
                line.sendall(onward.recv(4096))
                sent.extend(line.recv(4096))
                onward.sendall(sent)
                line.sendall(onward.recv(4096))

        thread = threading.Thread(target=forward)
        thread.start()
        connect_proven(relay.getsockname(), SECRET, PURPOSE, number=1, timeout_s=10).close()
        thread.join(10)
    return bytes(sent)


def test_a_connection_may_be_dropped_for_another_that_is_ready_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "_MOST_UNPROVEN", 1)
    monkeypatch.setattr(proof, "_CROWDED_S", 0.0)
    listener = ProvenListener(LOOPBACK, SECRET, PURPOSE)
    with ExitStack() as lines:
        lines.enter_context(socket.create_connection(listener.place)).sendall(b"bye")
        listener.attend(listener._listener)
        [first] = listener._unproven
        lines.enter_context(socket.create_connection(listener.place))
        listener.attend(listener._listener)
        assert first not in listener._unproven  # and yet it was ready, too
        listener.attend(first)
        ended = listener._listener
        listener.close()
        listener.attend(ended)
