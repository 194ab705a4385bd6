"""Runs one command on every host of an emulated network, as ranks of one job.

``ddltrace run`` traces all of them as one job::

    ddltrace run -- python -m ddltrace.experiments.network.launch \\
        --hosts 4 --bandwidth 400mbit -- python train.py

Every host runs one rank and has a name of its own (host0, host1, ...); the ranks find each
other through ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as under torchrun.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ddltrace.experiments.network.emulated import INTERFACE, EmulatedNetwork, parse_bandwidth
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.exit_status import shell_status

_PORT: Final = "29500"  # the hosts' network is their own: no port is taken
_GRACE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWUTS: Final = 0x04000000
_LIBC: Final = ctypes.CDLL(None)


class _Stopped(BaseException):
    """A signal asks for the end; what was made has to be removed first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job.

    Returns:
        The status of the first rank that failed, 128 + n if it or this process got signal n,
        else 0.
    """
    options = _parse_options(arguments)
    for number in _STOPPING:
        signal.signal(number, _stop)
    try:
        network = EmulatedNetwork(
            hosts=options.hosts, bits_per_second=parse_bandwidth(options.bandwidth)
        )
        with network:
            try:
                return _run_ranks(network, options.command)
            finally:
                _ignore_signals()
    except _Stopped as stopped:
        return 128 + stopped.number
    except DdltraceError as error:
        print(f"ddltrace: {error}", file=sys.stderr)
        return error.exit_code


def _run_ranks(network: EmulatedNetwork, command: Sequence[str]) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(len(network.hosts)):
            ranks.append(
                subprocess.Popen(
                    network.command(rank, command),
                    env={**os.environ, **_environment(network, rank)},
                    # Signals reach the ranks through us, once; when we are killed, they die.
                    start_new_session=True,
                    preexec_fn=functools.partial(_become_host, rank),  # noqa: PLW1509 - no threads
                )
            )
        while True:
            states = [process.poll() for process in ranks]
            failed = [state for state in states if state]
            if failed:
                return shell_status(failed[0])
            if all(state == 0 for state in states):
                return 0
            time.sleep(_POLL_SECONDS)
    finally:
        _end(ranks)


def _environment(network: EmulatedNetwork, rank: int) -> dict[str, str]:
    size = len(network.hosts)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        # The hosts share this machine's cores, as torchrun's local ranks do.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends every rank that still runs: asks first, then insists."""
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _become_host(number: int) -> None:
    """Ties a child to our life and gives it a host name of its own, before it executes."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # Only in a namespace of its own: else the machine itself would be renamed.
    if _LIBC.unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(f"host{number}")


def _ignore_signals() -> None:
    """From here on nothing may keep the network from being removed."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: Any) -> NoReturn:
    _ignore_signals()
    raise _Stopped(number)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ddltrace.experiments.network.launch",
        description="run one command on every host of an emulated network",
    )
    parser.add_argument("--hosts", type=int, required=True, help="number of hosts")
    parser.add_argument("--bandwidth", required=True, help="rate of every link, e.g. 400mbit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND...")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if not options.command:
        parser.error("no command: end the line with -- COMMAND...")
    return options


if __name__ == "__main__":
    sys.exit(main())
