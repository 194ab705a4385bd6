"""Which thread a step belongs to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ddltrace.tracer.record.recorder import FLAT_CELLS, Recorder
from ddltrace.tracer.record.step_tracker import Steps

HERE = threading.get_ident()


def beside(call: Callable[[], None]) -> int:
    """Calls something in another thread; returns which."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert thread.ident is not None
    return thread.ident


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("updates_beside", [True, False])
def test_a_step_is_of_the_thread_that_trains(trains: bool, updates_beside: bool) -> None:
    recorder = Recorder(100)
    steps = Steps(recorder)

    def update(number: int) -> None:
        steps.begin_update(7, 100 * number + 40)
        steps.end_update(100 * number + 50)

    expected = []
    for number in range(3):
        if trains:
            steps.begin_training(100 * number)
        if updates_beside:
            updater = beside(lambda number=number: update(number))
        else:
            update(number)
            updater = HERE
        expected.append(HERE if trains else updater)
    beside(steps.close)
    assert list(recorder.flat[3::FLAT_CELLS]) == expected
    assert list(recorder.flat[2::FLAT_CELLS]) == [50, 150, 250]
