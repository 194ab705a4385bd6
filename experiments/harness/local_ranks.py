"""Runs a command as the ranks of one job on this machine::

    python -m ddltrace.experiments.harness.local_ranks --ranks 3 -- -m MODULE ...

torchrun would do it, too, but loads PyTorch itself, and ends a job when one rank dies. A job whose
workers do not wait for each other can lose one of them (``--started FILE``).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddltrace.experiments.network.rank_processes import (
    Stopped,
    end,
    raise_on_stop_signals,
    supervise,
)
from ddltrace.experiments.parent_process import end_with_parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job.

    Returns:
        As `supervise`; 128 + n if signal n ended the job.
    """
    options = _parse_options(arguments)
    raise_on_stop_signals()
    reserved = _reserve_port()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserved.getsockname()[1]),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *options.command],
                    env={**os.environ, **environment, **own},
                    # This process forwards signals once; if it is killed, the ranks die with it.
                    start_new_session=True,
                    preexec_fn=_die_with_launcher,  # noqa: PLW1509 - no threads
                )
            )
        return supervise(ranks, tolerant_from=options.started)
    except Stopped as stopped:
        return 128 + stopped.number
    finally:
        end(ranks)
        reserved.close()


def _die_with_launcher() -> None:
    end_with_parent(number=signal.SIGKILL)


def _reserve_port() -> socket.socket:
    """A socket that keeps a port of this machine from other processes while it is open.

    The socket does not listen, and rank 0 can bind the same port, because both set SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="run one command as the ranks of one job")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--started", type=Path, help="when this file exists, a rank's death ends no other rank"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- arguments of Python")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    return options


if __name__ == "__main__":
    sys.exit(main())
