"""Steps of a training are counted as the trace counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddltrace.experiments.observation import step_count
from ddltrace.experiments.observation.step_count import StepCount
from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.record.recorder import FLAT_CELLS, Recorder
from ddltrace.tracer.record.step_tracker import Steps


@pytest.mark.parametrize(
    ("training", "first"),
    [
        # A backward pass before each of two optimizers, as in a GAN.
        (["train", 1, "train", 2, "train", 1, "train", 2], [True, True, True, True]),
        # Two optimizers after one backward pass.
        (["train", 1, 2, "train", 1, 2], [True, False, True, False]),
        # One optimizer twice, and a later phase with another one.
        (["train", 1, 1, 2, "train", 3, 3], [True, True, False, True, True]),
    ],
)
def test_the_first_updates_are_those_of_the_traces_steps(
    training: list[object], first: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(100)
    steps = Steps(recorder)
    session = SimpleNamespace(context=SimpleNamespace(steps=steps))
    monkeypatch.setattr(step_count, "current_session", lambda: session)
    count, found = StepCount(), []
    for time, event in enumerate(training):
        if isinstance(event, int):
            steps.begin_update(event, time)
            steps.end_update(time)
            found.append(count.is_first_update())
        else:
            steps.begin_training(time)
    steps.close()
    assert found == first
    assert len(recorder.flat) == sum(first) * FLAT_CELLS


def test_without_a_trace_nothing_is_counted() -> None:
    with pytest.raises(MissingCapabilityError, match="not recorded"):
        StepCount()
