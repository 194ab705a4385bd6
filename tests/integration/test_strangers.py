"""Strangers at every port that a job opens change neither its weights nor its end."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.jobs import DDLTRACE, LAUNCH_RANKS, environment, free_port

from ddltrace.tracer.optional_packages import missing_packages
from ddltrace.tracer.trace.run_reader import read_run

JOB = Path(__file__).parent / "jobs" / "strangers_job.py"
GREETING = b"ddltrace proof 1"
HELD = 100
SERVICES = [
    pytest.param(
        spec,
        marks=pytest.mark.skipif(
            extra is not None and bool(missing_packages(extra)), reason=f"needs ddltrace[{extra}]"
        ),
    )
    for spec, extra in (
        ("wfbp+zmq", "zmq"),
        ("wfbp+grpc", "grpc"),
        ("wfbp+tcp:connections=2", None),
        ("wfbp+mpi", "mpi"),
        ("wfbp+ucx", "mpi"),
        ("ps:servers=1", None),
    )
]


def forged(chance: random.Random) -> list[bytes]:
    """What a stranger sends: nothing, random bytes, and the first bytes of each protocol."""
    return [
        b"",
        b"b",
        b"bye",
        struct.pack("<i", 1),
        struct.pack("<Q", 1 << 62),
        b"\xff" * 4096,
        chance.randbytes(chance.randrange(1, 1 << 16)),
        # A proof with a wrong secret, and one that breaks off.
        GREETING + chance.randbytes(32) + struct.pack("!Q", 1) + chance.randbytes(32),
        GREETING + chance.randbytes(20),
        # ZeroMQ with the mechanism NULL, then a frame of a rank, and its end.
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48),
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL"
        + bytes(48)
        + b"\4\x19\5READY\x0bSocket-Type\0\0\0\4PUSH"
        b"\1\x08\1\0\0\0\1\0\0\0" + b"\0\4" + struct.pack("<f", 1e9) + b"\0\3bye",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        struct.pack("<iiqqqq", 1, 1, 0, 4, 0, 4) + struct.pack("<f", 1e9),
        b"cmd=init pmi_version=1 pmi_subversion=1\ncmd=barrier_in\ncmd=watch rank=1\n",
    ]


class Strangers(threading.Thread):
    """Visits every port on which the processes below one listen, again and again.

    All but that of the job's store: it is PyTorch's, which hangs after some of these visits.

    Attributes:
        visits: Connections to each port.
        wide: Addresses on which a process listened, other than loopback.
    """

    def __init__(self, root: int, store_port: int) -> None:
        super().__init__(daemon=True)
        self._store_port = store_port
        self._root = psutil.Process(root)
        self._chance = random.Random(root)
        self._held: list[socket.socket] = []
        self.visits: Counter[int] = Counter()
        self.wide: dict[int, str] = {}
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(0.05):
            for address, port in self._listening():
                if port == self._store_port:
                    continue
                if address.removeprefix("::ffff:") != "127.0.0.1":  # gRPC's is of both families
                    self.wide[port] = address
                self._visit(address, port)
        for held in self._held:
            held.close()

    def _listening(self) -> set[tuple[str, int]]:
        found = set()
        with contextlib.suppress(psutil.Error):
            for process in self._root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found |= {
                        (connection.laddr.ip, connection.laddr.port)
                        for connection in process.net_connections()
                        if connection.status == psutil.CONN_LISTEN
                    }
        return found

    def _visit(self, address: str, port: int) -> None:
        for data in forged(self._chance):
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, port), 0.2)
                self.visits[port] += 1
                connection.sendall(data)
                if len(self._held) < HELD and self._chance.random() < 0.5:
                    self._held.append(connection)
                else:
                    connection.close()


def train(folder: Path, *spec: str, strangers: bool) -> tuple[bytes, Strangers | None]:
    """The weights after a traced job, and who came."""
    folder.mkdir()
    store_port = free_port()
    command = [*DDLTRACE, "run", "-o", str(folder / "trace"), "--"]
    with subprocess.Popen(
        [*command, DDLTRACE[0], str(LAUNCH_RANKS), "2", str(JOB), str(folder / "weights"), *spec],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(STORE_PORT=str(store_port)),
    ) as job:
        came = Strangers(job.pid, store_port) if strangers else None
        if came is not None:
            came.start()
        try:
            _, errors = job.communicate(timeout=100)
        finally:
            job.kill()
            if came is not None:
                came.ending.set()
                came.join()
    assert job.returncode == 0, errors
    return (folder / "weights").read_bytes(), came


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return train(tmp_path_factory.mktemp("undisturbed") / "ddp", strangers=False)[0]


@pytest.mark.long
@pytest.mark.parametrize("spec", SERVICES)
def test_strangers_change_no_weight(spec: str, undisturbed: bytes, tmp_path: Path) -> None:
    weights, came = train(tmp_path / "job", spec, strangers=True)
    assert weights == undisturbed
    assert came is not None
    assert len(came.visits) > 2, came.visits
    # MPICH's UCX does not work over loopback; nobody is admitted once all ranks are connected.
    assert spec == "wfbp+ucx" or not came.wide, came.wide
    run = read_run(tmp_path / "job" / "trace")
    assert sum(info.refused_connections for info in run.ranks) > 0, came.visits
    assert run.status == "complete", run.notes
    assert any("were refused" in note for note in run.notes)
