"""A process manager for MPI, which connects ranks of MPICH that it did not start itself.

MPICH asks its process manager for its rank and exchanges addresses through it, in the PMI-1
protocol: lines of ``key=value`` over TCP. Rank 0 starts this file, so that MPI works under any
launcher of the job, such as torchrun::

    python pmi_server.py ADDRESS RANKS

It prints its port, and ends when all ranks have, or with its parent. It also reports to each rank
which others are gone: a rank opens a second connection, sends ``cmd=watch rank=N``, and reads a
line with a rank's number when that rank's own second connection ends. It is a process of its own
because ranks hold Python's interpreter lock while MPI initializes.

Protocol: PMI-1 of "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
Systems", Balaji et al., EuroMPI 2010, and its wire format in MPICH's documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import sys
import threading
from typing import Final, TextIO

_PR_SET_PDEATHSIG: Final = 1
_ANSWERS: Final = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
    "get_appnum": "cmd=appnum appnum=0 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=ddltrace rc=0",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out rc=0",
    "finalize": "cmd=finalize_ack rc=0",
}
_NOT_FOUND: Final = "rc=-1 msg=key_not_found value=unknown"


class PmiServer:
    """What the ranks of one job put and get."""

    def __init__(self, size: int) -> None:
        """Opens the server's socket.

        Args:
            size: Ranks.
        """
        self._size = size
        self._values: dict[str, str] = {}
        self._at_barrier = threading.Barrier(size)
        self._watching: dict[int, socket.socket] = {}
        self._gone: list[int] = []
        self._lock = threading.Lock()

    def serve(self, listening: socket.socket) -> None:
        """Answers all ranks until each has disconnected."""
        threads = []
        for _ in range(2 * self._size):
            connection, _address = listening.accept()
            threads.append(threading.Thread(target=self._serve_rank, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve_rank(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    fields = dict(field.split("=", 1) for field in line.split())
                    if fields.get("cmd") == "watch":
                        self._watch(int(fields["rank"]), connection, lines)
                        return
                    for answer in self._answer(fields):
                        connection.sendall(answer.encode() + b"\n")
        except (OSError, threading.BrokenBarrierError):
            pass  # the rank is gone, or another one that this one waits for
        # A rank that is gone will never arrive; others must not wait for it.
        self._at_barrier.abort()

    def _watch(self, rank: int, connection: socket.socket, lines: TextIO) -> None:
        """Reports ended ranks to a rank until it ends itself, then reports that to the others."""
        with self._lock:
            self._watching[rank] = connection
            for gone in self._gone:
                connection.sendall(f"{gone}\n".encode())
        with contextlib.suppress(OSError):
            lines.read()
        with self._lock:
            del self._watching[rank]
            self._gone.append(rank)
            for other in self._watching.values():
                with contextlib.suppress(OSError):
                    other.sendall(f"{rank}\n".encode())

    def _answer(self, fields: dict[str, str]) -> list[str]:
        command = fields.get("cmd", "")
        if command == "barrier_in":
            self._at_barrier.wait()
        if command == "put":
            self._values[fields["key"]] = fields["value"]
        if command == "get":
            value = self._values.get(fields["key"])
            found = f"rc=0 msg=success value={value}"
            return [f"cmd=get_result {found if value is not None else _NOT_FOUND}"]
        if command == "initack":
            settings = {"size": self._size, "rank": fields["pmiid"], "debug": 0}
            return ["cmd=initack rc=0", *(f"cmd=set {k}={v}" for k, v in settings.items())]
        if command == "get_universe_size":
            return [f"cmd=universe_size size={self._size} rc=0"]
        return [_ANSWERS.get(command, f"cmd={command} rc=-1 msg=unknown_command")]


def main() -> None:
    """Serves one job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # A Ctrl-C ends the ranks; the server ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address, size = sys.argv[1], int(sys.argv[2])
    with socket.create_server((address, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        PmiServer(size).serve(listening)


if __name__ == "__main__":
    main()
