"""Runs one command on every host of an emulated network, as ranks of one job.

``ddltrace run`` traces all of them as one job::

    ddltrace run -- python -m ddltrace.experiments.network.launch \\
        --hosts 4 --bandwidth 400mbit -- python train.py

Every host runs one rank or several and has a name of its own (host0, host1, ...); the ranks find
each other through ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as under
torchrun. The links are measured first: the job does not run on links that are off.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ddltrace.experiments.network.emulated import INTERFACE, EmulatedNetwork, check_capabilities
from ddltrace.experiments.network.link_check import check_links, check_round_trip
from ddltrace.experiments.network.rank_processes import (
    Stopped,
    end,
    ignore_stop_signals,
    raise_on_stop_signals,
    supervise,
)
from ddltrace.experiments.network.topology import Topology, topology
from ddltrace.experiments.parent_process import end_with_parent
from ddltrace.tracer.errors import DdltraceError

_PORT: Final = "29500"  # the hosts' network is their own: no port is taken
_CLONE_NEWUTS: Final = 0x04000000
_LIBC: Final = ctypes.CDLL(None)


def check(options: Mapping[str, Any]) -> None:
    """Checks whether an emulated network can be created: the tracer's entry point ``hosts``.

    Args:
        options: Arguments of `topology` by name.

    Raises:
        UsageError: A value is wrong.
        MissingCapabilityError: This machine cannot create the network.
    """
    topology(**options)
    check_capabilities()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job.

    Returns:
        The status of the first rank that failed, 128 + n if it or this process got signal n,
        else 0.
    """
    options = _parse_options(arguments)
    raise_on_stop_signals()
    try:
        with EmulatedNetwork(_topology(options)) as network:
            try:
                _prepare(network)
                return _run_ranks(network, options.command, options.started)
            finally:
                ignore_stop_signals()  # the network is removed in any case
    except Stopped as stopped:
        return 128 + stopped.number
    except DdltraceError as error:
        print(f"ddltrace: {error}", file=sys.stderr)
        return error.exit_code


def _prepare(network: EmulatedNetwork) -> None:
    """Measures the network, prints the results, and adds delay and loss."""
    slow = network.topology.slow_host
    if slow is not None and slow.at_seconds == 0:
        network.slow_down()
    links = check_links(network)
    print(f"ddltrace: measured links: {', '.join(map(str, links))}", file=sys.stderr, flush=True)
    network.delay()
    # Lost packets are sent again after 200 ms: the shortest of some round trips shows no loss.
    round_trip = check_round_trip(network)
    print(f"ddltrace: measured round trip: {round_trip * 1e3:.3g} ms", file=sys.stderr, flush=True)


def _run_ranks(network: EmulatedNetwork, command: Sequence[str], started: Path | None) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    per_host = network.topology.ranks_per_host
    slow = network.topology.slow_host
    slows_at = slow.at_seconds if slow is not None and slow.at_seconds > 0 else math.inf
    begin = time.monotonic()
    try:
        for rank in range(len(network.hosts) * per_host):
            host = rank // per_host
            ranks.append(
                subprocess.Popen(
                    network.command(host, command),
                    env={**os.environ, **_environment(network, rank)},
                    # Signals reach the ranks once, through this process; if it is killed, they die.
                    start_new_session=True,
                    preexec_fn=functools.partial(_become_host, host),  # noqa: PLW1509 - no threads
                )
            )

        def slow_down_in_time() -> None:
            nonlocal slows_at
            if time.monotonic() - begin >= slows_at:
                network.slow_down()
                slows_at = math.inf
                assert slow is not None
                print(
                    f"ddltrace: the link of host {slow.host} is slow from now on",
                    file=sys.stderr,
                    flush=True,
                )

        return supervise(ranks, tolerant_from=started, poll=slow_down_in_time)
    finally:
        end(ranks)


def _environment(network: EmulatedNetwork, rank: int) -> dict[str, str]:
    per_host = network.topology.ranks_per_host
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(network.hosts) * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        # The hosts share this machine's cores, as torchrun's local ranks do.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _become_host(number: int) -> None:
    """Before `exec`: lets the child end with this process, and sets its host name."""
    end_with_parent(number=signal.SIGKILL)
    # Only in a separate namespace; otherwise the machine itself would be renamed.
    if _LIBC.unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(f"host{number}")


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ddltrace.experiments.network.launch",
        description="run one command on every host of an emulated network",
    )
    parser.add_argument("--hosts", type=int, required=True, help="number of hosts")
    parser.add_argument("--bandwidth", required=True, help="rate of every link, e.g. 400mbit")
    parser.add_argument("--hosts-per-rack", type=int, help="hosts that share a switch")
    parser.add_argument("--bandwidth-between", help="rate of each rack's link to the core")
    parser.add_argument("--slow-host", help="host=N,factor=F[,at=SECONDS]: a slower link")
    parser.add_argument("--delay", help="one-way delay between hosts, e.g. 2ms")
    parser.add_argument("--loss", help="share of packets that are lost, e.g. 0.1%%")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument(
        "--started",
        type=Path,
        help="when this file exists, a rank's death ends no other rank",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND...")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if not options.command:
        parser.error("no command: end the line with -- COMMAND...")
    return options


def _topology(options: argparse.Namespace) -> Topology:
    return topology(
        hosts=options.hosts,
        bandwidth=options.bandwidth,
        hosts_per_rack=options.hosts_per_rack,
        bandwidth_between=options.bandwidth_between,
        slow_host=options.slow_host,
        delay=options.delay,
        loss=options.loss,
        ranks_per_host=options.ranks_per_host,
    )


if __name__ == "__main__":
    sys.exit(main())
