"""A process manager for MPI, which connects ranks of MPICH that it did not start itself.

MPICH asks its process manager for its rank and exchanges addresses through it, in the PMI-1
protocol: lines of ``key=value`` over TCP. Rank 0 starts this module as a program, so that MPI works
under any launcher of the job, such as torchrun. Its arguments are the address on which it listens
and the number of ranks; it reads the job's secret, which each connection proves, from its input.

It prints its port, and ends when all ranks have, or with its parent. It also reports to each rank
which others are gone: rank r connects twice, as number r for MPICH and as number RANKS + r for
itself, and reads a line with a rank's number when that rank's own second connection ends. It
listens no more when every rank has come twice. It is a process of its own because ranks hold
Python's interpreter lock while MPI initializes.

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
from typing import Final

from ddltrace.tracer.connections.proof import ProvenListener

PURPOSE: Final = "pmi"
"""Of the proofs."""

_FOREVER_S: Final = 1e6
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

    def serve(self, listening: ProvenListener) -> None:
        """Answers all ranks until each has disconnected."""
        threads = []
        for number, connection in listening.accept_each(range(2 * self._size), _FOREVER_S):
            serve = self._serve_rank if number < self._size else self._watch
            threads.append(threading.Thread(target=serve, args=(connection, number)))
            threads[-1].start()
        listening.close()
        for thread in threads:
            thread.join()

    def _serve_rank(self, connection: socket.socket, rank: int) -> None:
        del rank  # MPICH has been told
        try:
            with connection, connection.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    fields = dict(field.split("=", 1) for field in line.split())
                    for answer in self._answer(fields):
                        connection.sendall(answer.encode() + b"\n")
        except (OSError, threading.BrokenBarrierError):
            pass  # the rank is gone, or another one that this one waits for
        # A rank that is gone will never arrive; others must not wait for it.
        self._at_barrier.abort()

    def _watch(self, connection: socket.socket, number: int) -> None:
        """Reports ended ranks to a rank until it ends itself, then reports that to the others."""
        rank = number - self._size
        with self._lock:
            self._watching[rank] = connection
            for gone in self._gone:
                connection.sendall(f"{gone}\n".encode())
        with connection, contextlib.suppress(OSError):
            connection.recv(1)
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
        if command == "get_universe_size":
            return [f"cmd=universe_size size={self._size} rc=0"]
        return [_ANSWERS.get(command, f"cmd={command} rc=-1 msg=unknown_command")]


def main() -> None:
    """Serves one job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # A Ctrl-C ends the ranks; the server ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address, size = sys.argv[1], int(sys.argv[2])
    secret = bytes.fromhex(sys.stdin.readline())
    listening = ProvenListener(address, secret, PURPOSE)
    print(listening.port, flush=True)
    PmiServer(size).serve(listening)


if __name__ == "__main__":
    main()
