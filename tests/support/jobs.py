"""Runs real jobs, traced and untraced."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

JOBS = Path(__file__).resolve().parent.parent / "jobs"
LAUNCH_RANKS = Path(__file__).resolve().parent / "launch_ranks.py"
DDLTRACE = [sys.executable, "-m", "ddltrace"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# A job of one rank without a launcher. The only process of a job can take any free port.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
_RELEASE = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
# Whether the kernel still reports how a process ended after its parent has read the status.
STATUS_REMAINS = _RELEASE >= (6, 15)


@dataclass
class Done:
    """A process that has ended."""

    status: int
    stdout: str
    stderr: str

    def losses(self) -> list[str]:
        """What was printed of losses, sorted, since ranks print in any order.

        A line may begin in the middle of one: what another rank has just printed may lack its end.
        """
        return sorted(re.findall(r"rank \d+ (?:.* )?loss .*", self.stdout))


def without_native_logs(lines: Iterable[str]) -> list[str]:
    """Some lines of stderr, sorted, less those that PyTorch's C++ code logs.

    Those carry a time, and some, as of a connection that was tried again, come when a machine is
    busy.
    """
    return sorted(line for line in lines if not re.match(r"\[(rank\d+\]:)?\[?[IWE]\d{4} ", line))


def environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DDLTRACE")}
    return {**inherited, "OMP_NUM_THREADS": "1", **extra}


def run(command: list[str], *, cwd: Path, timeout: float = 120, **extra: str) -> Done:
    """Runs a command to its end."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def ray_environment(home: Path) -> dict[str, str]:
    """Variables of a job that starts Ray, which writes to the home directory."""
    return {
        **{"HOME": str(home), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        # What ddltrace has compiled lies in the cache below the user's own home.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Makes some calls at the same time: jobs that do not depend on each other.

    Returns:
        Their results, in order.
    """
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def free_port() -> int:
    """A port of this host that no process listens to.

    It lies below the range from which Linux takes the ports of outgoing connections (32768 and
    above): such a connection could take the port before the caller listens to it.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start(
    command: list[str], *, cwd: Path, stderr: int | IO[str] = subprocess.DEVNULL, **options: bool
) -> subprocess.Popen[str]:
    """Starts a command whose output is read while it runs."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        **options,
    )


def torchrun(script: str | Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The command that starts a script of `tests/jobs` on some ranks."""
    path = JOBS / script
    return [*TORCHRUN, f"--nproc-per-node={ranks}", str(path), *arguments]


def on_ranks(script: str | Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The same by a launcher that is up sooner, for jobs of which the launcher is not the point."""
    return [sys.executable, str(LAUNCH_RANKS), str(ranks), str(JOBS / script), *arguments]


def traced(trace: Path, command: list[str], *options: str) -> list[str]:
    """The same command under the tracer."""
    return [*DDLTRACE, "run", "-o", str(trace), *options, "--", *command]
