"""One server as a process of its own; `server_group.py` starts it.

It ends when all workers have finished or died. Until all of them are connected, it ends with the
process that started it, too.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import Final

from ddltrace.experiments.asynchrony.update_server import UpdateServer
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.collectives.server import join
from ddltrace.experiments.messages.trace_marks import mark
from ddltrace.experiments.parent_process import outlive_parent
from ddltrace.experiments.strategy.plugins import load_inherited
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.tracer.errors import MissingCapabilityError

_DRAIN_SECONDS: Final = 10.0


def main() -> None:
    """Serves until the end."""
    # The first to be registered runs last: threads that wait for dead workers cannot end.
    atexit.register(os._exit, 0)
    load_inherited()
    ended = _Ended()
    joined = join(ended)
    outlive_parent()  # all workers are connected, so lifelines replace the parent
    strategy = parse(joined.options["spec"])
    workers = joined.options["global_ranks"][: joined.workers]
    assert isinstance(strategy.synchronization, ServerRule)
    description = compose(strategy.codec, strategy.feedback)
    server = UpdateServer(
        strategy.synchronization,
        None if description is None else description.codec(None),
        joined.group,
        workers,
    )
    servers = joined.options["servers"]
    mark(mark_name("rule", spec=strategy.spec, workers=workers, servers=servers))
    ended.set_server(server, len(workers))
    server.run()
    # The last messages are in flight until the workers have closed their lines.
    ended.all.wait(_DRAIN_SECONDS)
    joined.lines.close()


class _Ended:
    """Stores which lifelines have ended until a server can receive the information."""

    def __init__(self) -> None:
        self.all = threading.Event()
        self._left = 0
        self._lock = threading.Lock()
        self._kept: list[tuple[int, bool]] = []
        self._server: UpdateServer | None = None

    def __call__(self, worker: int, said_goodbye: bool) -> None:
        with self._lock:
            if self._server is None:
                self._kept.append((worker, said_goodbye))
                return
            self._end(self._server, worker, said_goodbye)

    def set_server(self, server: UpdateServer, workers: int) -> None:
        with self._lock:
            self._server = server
            self._left = workers
            for worker, said_goodbye in self._kept:
                self._end(server, worker, said_goodbye)

    def _end(self, server: UpdateServer, worker: int, said_goodbye: bool) -> None:
        server.line_ended(worker, said_goodbye)
        self._left -= 1
        if not self._left:
            self.all.set()


if __name__ == "__main__":
    with suppress(MissingCapabilityError):  # the workers say it
        main()
