"""Threads that talk to a store, which may never answer: the process can end without them.

At the end of a process, pyarrow waits for requests that are under way, also for those of daemon
threads. An entry point that finds one left ends the process itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

Result = TypeVar("Result")

_NAME: Final = "ddltrace-store"


def begin_in_store_thread(work: Callable[[], Result]) -> Future[Result]:
    """Begins some work in a thread of its own, so that the caller can stop waiting for it."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the answer is read
            answer.set_exception(error)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return answer


def is_any_left() -> bool:
    """Whether one of these threads still runs."""
    return any(thread.name == _NAME for thread in threading.enumerate())
