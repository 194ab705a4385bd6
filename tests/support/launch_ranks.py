"""Starts a script on some ranks of this host and waits for them: a small ``mpirun``.

    python launch_ranks.py 2 train.py ARGUMENT...

It does not load PyTorch, as torchrun does, which takes longer than most of the jobs here. If a rank
fails, the others are ended, and its status is the launcher's. On SIGTERM all are ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from jobs import free_port  # type: ignore[attr-defined] # a script, whose folder Python finds

PAUSE_S = 0.02


def main() -> int:
    count, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {"WORLD_SIZE": str(count), **address}
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(count)
    ]
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    while not signals:
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status]
        if failed or None not in statuses:
            break
        time.sleep(PAUSE_S)
    for rank in ranks:
        rank.terminate()
        rank.wait()
    return 128 + signals[0] if signals else abs(failed[0]) if failed else 0


sys.exit(main())
