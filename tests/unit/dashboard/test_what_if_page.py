"""The page of what-if questions: `dashboard/pages/what_if_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

import plotly.utils
import pytest

import ddltrace
from ddltrace.dashboard.pages.what_if_page import _FIELDS, answers_of
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.errors import UsageError

SAMPLES = Path(__file__).parents[3] / "sample_traces"


def asked(trace: str, *, every: bool = False, **texts: str) -> str:
    opened = Workspace([ddltrace.open(SAMPLES / trace)]).get(0)
    given = {name: texts.get(name.replace("-", "_")) for name, _, _ in _FIELDS}
    found = answers_of(opened, given, every=every, theme="light")
    return json.dumps(found, cls=plotly.utils.PlotlyJSONEncoder)


def test_a_question_is_answered() -> None:
    said = asked("straggler", without_straggler="1")
    assert "without-straggler 1" in said
    assert "as in the trace" in said
    assert "120 ms per step in the trace" in said


@pytest.mark.long
def test_every_strategy_is_ranked_and_what_is_not_known_has_a_reason() -> None:
    said = asked("ddp-4-hosts-400mbit", every=True)
    assert said.index("bf16") < said.index("fifo")
    assert "which layers send factors depends on the batch" in said


def test_a_question_that_the_trace_does_not_answer() -> None:
    assert "--batch-size" in asked("straggler", batch_size="4")


@pytest.mark.parametrize(
    "texts", [{}, {"ranks": "many"}, {"bandwidth": "fast"}, {"straggler": "1"}, {"faster": "x=0"}]
)
def test_what_cannot_be_read_is_said(texts: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        asked("straggler", **texts)
