"""Threads that talk to a store, which may never answer: the process can end without them.

At the end of a process, pyarrow waits for requests that are under way, also for those of daemon
threads. An entry point that finds one left ends the process itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_started: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start_store_thread(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Starts a thread that talks to a store."""
    thread = threading.Thread(target=target, args=arguments, name="store", daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def begin_in_store_thread(work: Callable[[], Result]) -> Future[Result]:
    """Begins some work in a thread of its own, so that the caller can stop waiting for it."""
    answer: Future[Result] = Future()
    start_store_thread(_answer, answer, work)
    return answer


def is_any_left() -> bool:
    """Whether one of these threads still runs."""
    return any(thread.is_alive() for thread in _started)


def _answer(answer: Future[Result], work: Callable[[], Result]) -> None:
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        answer.set_exception(error)
    else:
        answer.set_result(result)
