"""Measures: the example of docs/architecture.md, in steps at once and in ranges."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ddltrace.analyzer import analysis, model
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.report import text_report
from ddltrace.analyzer.report.text_report import render_report

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the example; its measure is registered in `Analysis`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code, line = re.findall(r"```python\n(.*?)```", text.split("## Add a measure")[1], re.DOTALL)[
        :2
    ]
    module = ModuleType("longest_messages")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code, module.__dict__)
    names = {**vars(model), **vars(module), "dataclass": dataclasses.dataclass}
    exec(f"@dataclass(frozen=True)\nclass Extended(Analysis):\n{line}", names)
    extended = names["Extended"]
    measures = {each.name: each.metadata["measure"] for each in dataclasses.fields(extended)}
    computed = tuple(each for each in measures.values() if each.compute is not None)
    monkeypatch.setattr(analysis, "Analysis", extended)
    monkeypatch.setattr(analysis, "MEASURES", measures)
    monkeypatch.setattr(text_report, "MEASURES", measures)
    for place in ("ddltrace.analyzer.model", "ddltrace.analyzer.step_ranges"):
        monkeypatch.setattr(f"{place}.COMPUTED", computed)
    return module


def limited(path: Path) -> Trace:
    """The trace with a memory limit that divides it into several ranges of steps."""
    trace = open_trace(path)
    trace.memory_limit = 1
    assert trace.step_selection is not None
    kept = int(trace.step_selection.sizes.sum())
    trace = open_trace(path)
    trace.memory_limit = kept - 1
    return trace


def test_the_documented_measure_is_computed_and_merged(example: ModuleType) -> None:
    path = ROOT / "sample_traces" / "straggler"
    whole = open_trace(path).analyze().to_json()["longest_messages"]
    trace = open_trace(path)
    assert [row["rank"] for row in whole] == trace.ranks
    for row in whole:
        events = trace.events(row["rank"])
        is_message = np.array(events["kind"].to_pylist()) == "message"
        start, end = (events[name].to_numpy()[is_message] for name in ("start_ns", "end_ns"))
        assert row["duration_us"] == pytest.approx(np.nanmax(end - start) / 1e3)
    report = render_report(open_trace(path).analyze())
    assert "Longest messages\n  rank " in report
    merged = limited(path).analyze().to_json()
    assert "were analyzed in" in merged["trace"]["notes"][-1]
    steps = open_trace(path).analyze(range(0, 1 << 20)).to_json()["longest_messages"]
    assert merged["longest_messages"] == steps
