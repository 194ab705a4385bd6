"""Critical paths of annotations and of windows of time, in place of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.trace.windows import with_window
from ddltrace.tracer.errors import UsageError

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"


@pytest.fixture
def trace(build: Any) -> Trace:
    """Two ranks, a step of 1,000 us, in it two annotated regions; rank 1 is late to a message."""
    built = build(2)
    for rank in range(2):
        one = built[rank]
        one.whole_step(0, 0, 1000)
        late = 30 * rank
        for begin, length in ((100, 200), (500, 300)):
            one.add("marker", begin, begin + length, name="region", step=0)
            one.add("phase", begin, begin + 50 + late, name="forward", phase="forward", step=0)
            one.message("all_reduce", begin + 50 + late, begin + 100, bytes=8, seq=begin, step=0)
    opened: Trace = built.trace()
    return opened


def test_every_annotation_of_a_name_is_a_step(trace: Trace) -> None:
    analysis = with_window(trace, "region").analyze()
    assert [(row.step, row.wall_us) for row in analysis.steps] == [(0, 200.0), (1, 300.0)]
    for row in analysis.steps:
        path = row.critical_path
        assert path.total_us == pytest.approx(row.wall_us)
        assert path.compute_us == pytest.approx(80.0)
    assert any("annotations that --window names: region" in note for note in analysis.trace.notes)


def test_a_window_of_time_is_one_step(trace: Trace) -> None:
    analysis = with_window(trace, "100:300.5").analyze()
    [row] = analysis.steps
    assert (row.wall_us, row.ranks) == (200.5, 2)
    assert row.critical_path.total_us == pytest.approx(200.5)
    assert row.critical_path.compute_us == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("window", "error"), [("nothing", "name of no annotation"), ("5:5", "is empty")]
)
def test_windows_that_are_not_there(window: str, error: str, trace: Trace) -> None:
    with pytest.raises(UsageError, match=error):
        with_window(trace, window)


def test_option_of_analyze() -> None:
    result = CliRunner().invoke(analyze, [str(SAMPLE), "--window", "forward"])
    assert result.exit_code == 0
    events = open_trace(SAMPLE).events(0)
    forward = sum(name == "forward" for name in events["name"].to_pylist())
    assert f" {forward} steps" in result.output
    both = CliRunner().invoke(analyze, [str(SAMPLE), "--window", "a", "--definitions", "hta"])
    assert isinstance(both.exception, UsageError)
