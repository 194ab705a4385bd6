"""Which threads may look at gradients: in real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddltrace.tracer.naming.gradient_access import GradientAccess


class Worker:
    """A thread that calls what it is given, one after the other."""

    def __init__(self) -> None:
        self._call: Callable[[], object] = bool
        self._result: object = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            self._result = self._call()
            self._done.release()

    def call(self, function: Callable[[], object]) -> object:
        self._call = function
        self._go.release()
        self._done.acquire()
        return self._result


def test_only_the_one_that_trains_may_look() -> None:
    access, other = GradientAccess(), Worker()
    assert access.may_read()  # no thread has trained: the main thread will
    assert not other.call(access.may_read)
    other.call(access.note_pass)
    assert other.call(access.may_read)
    assert not access.may_read()
    assert not access.may_read_ready()


def test_where_two_train_nobody_may_look() -> None:
    access, other = GradientAccess(), Worker()
    access.note_pass()
    other.call(access.note_pass)
    for ask in (access.may_read, access.may_read_ready):
        assert not ask()
        assert not other.call(ask)


def test_a_thread_of_the_engine_may_look_at_what_is_ready() -> None:
    access, engine, other = GradientAccess(), Worker(), Worker()
    access.note_pass()
    access.note_gradient()  # of the CPU: on the thread that trains
    engine.call(access.note_gradient)
    engine.call(access.note_pass)  # nested, by a checkpoint
    assert access.may_read()
    assert access.may_read_ready()
    assert not engine.call(access.may_read)
    assert engine.call(access.may_read_ready)
    assert not other.call(access.may_read_ready)
    other.call(access.note_pass)
    assert not engine.call(access.may_read_ready)
