"""One server as a process of its own; `server_group.py` starts it.

It ends when all workers have finished or died. Until all of them are connected, it ends with the
process that started it, too.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d as c10d

from ddltrace.experiments.asynchrony.update_server import UpdateServer
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.collectives.job_store import open_store
from ddltrace.experiments.collectives.lifelines import listen
from ddltrace.experiments.collectives.server import be_a_rank
from ddltrace.experiments.collectives.server_processes import join_group
from ddltrace.experiments.messages.trace_marks import mark
from ddltrace.experiments.parent_process import end_with_parent, outlive_parent
from ddltrace.experiments.strategy.plugins import load_inherited
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.transports.backends.meeting import JOIN_SECONDS
from ddltrace.experiments.transports.backends.register import backend_of
from ddltrace.tracer.errors import MissingCapabilityError

LONGEST_WAIT: Final = timedelta(days=30)
"""A worker may wait for a straggler for as long as it takes; lifelines report dead workers."""
_DRAIN_SECONDS: Final = 10.0


def main() -> None:
    """Serves until the end."""
    # The first to be registered runs last: threads that wait for dead workers cannot end.
    atexit.register(os._exit, 0)
    options: dict[str, Any] = json.loads(sys.argv[1])
    end_with_parent(options["parent"])
    # Ctrl-C reaches all processes of a terminal; the workers decide when servers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = open_store(options["store"], options["prefix"])
    load_inherited()
    strategy = parse(options["spec"])
    names: list[int] = options["global_ranks"]
    workers = options["workers"]
    lines = listen(store, options["server"], workers, len(names) - workers, JOIN_SECONDS)
    ended = _Ended(workers)
    lines.watch(ended)
    rank = workers + options["server"]
    if strategy.transport is not None:
        backend_of(strategy.transport)
    group = join_group(
        c10d.PrefixStore("group", store),
        rank,
        len(names),
        names,
        name=options["name"],
        backend=options["backend"],
        timeout=LONGEST_WAIT,
    )
    outlive_parent()  # all workers are connected, so lifelines replace the parent
    be_a_rank(rank=names[rank], ranks=max(names) + 1)
    assert isinstance(strategy.synchronization, ServerRule)
    description = compose(strategy.codec, strategy.feedback)
    server = UpdateServer(
        strategy.synchronization,
        None if description is None else description.codec(None),
        group,
        names[:workers],
    )
    mark(
        mark_name(
            "rule",
            spec=strategy.spec,
            workers=names[:workers],
            servers=len(names) - workers,
        )
    )
    ended.set_server(server)
    server.run()
    # The last messages are in flight until the workers have closed their lines.
    ended.all.wait(_DRAIN_SECONDS)
    lines.close()


class _Ended:
    """Stores which lifelines have ended until a server can receive the information."""

    def __init__(self, workers: int) -> None:
        self.all = threading.Event()
        self._left = workers
        self._lock = threading.Lock()
        self._kept: list[tuple[int, bool]] = []
        self._server: UpdateServer | None = None

    def __call__(self, worker: int, said_goodbye: bool) -> None:
        with self._lock:
            if self._server is None:
                self._kept.append((worker, said_goodbye))
            else:
                self._server.line_ended(worker, said_goodbye)
            self._left -= 1
            if not self._left:
                self.all.set()

    def set_server(self, server: UpdateServer) -> None:
        with self._lock:
            self._server = server
            for worker, said_goodbye in self._kept:
                server.line_ended(worker, said_goodbye)


if __name__ == "__main__":
    with suppress(MissingCapabilityError):  # the workers say it
        main()
