"""The end of a gradient's life: waited for by the host, updated by the optimizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from synthetic import Shape, write_trace

from ddltrace.analyzer.open_trace import open_trace


def test_every_gradient_is_waited_for_and_updated_after_its_message(tmp_path):
    shape = Shape(ranks=2, steps=6, layers=40, buckets=4)
    analysis = open_trace(write_trace(tmp_path / "trace", shape)).analyze()
    assert len(analysis.tensors) == shape.layers
    step_us = shape.step / 1e3
    for row in analysis.tensors:
        assert row.complete_us <= row.waited_us <= row.updated_us
        # The update is the last part of a step, and the wait ends where the update begins.
        assert row.updated_us == pytest.approx(step_us, rel=0.1)
        assert row.waited_us == pytest.approx(row.updated_us - shape.update / 1e3, abs=1)
