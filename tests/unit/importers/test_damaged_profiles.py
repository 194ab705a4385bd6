"""A profile that is cut anywhere moves no rank in time, and makes no step longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError

STEPS = 4
STEP_US = 10_000


def profile(rank: int) -> str:
    """A file whose base time stands behind the events; rank 1 comes 500 us later."""
    events = []
    for step in range(STEPS):
        at = step * STEP_US
        span = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "args": {}}
        events.append(span | {"name": f"ProfilerStep#{step}", "ts": at, "dur": STEP_US})
        device = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "args": {"stream": 7}}
        events.append(device | {"name": "gemm", "ts": at + 100, "dur": 2000})
        message = {"stream": 7, "Collective name": "allreduce", "Group size": 2, "Seq": step}
        start = at + 3000 + 500 * rank
        kernel = device | {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "args": message}
        events.append(kernel | {"ts": start, "dur": at + 6000 - start})
    content = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
        "baseTimeNanoseconds": 1_760_000_000_000_000_000,
    }
    return json.dumps(content, indent=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_file_makes_no_step_longer(tmp_path: Path, rank: int) -> None:
    texts = [profile(each) for each in range(2)]
    first = texts[rank].index("traceEvents") + 200
    read = 0
    for end in range(len(texts[rank]), first, -211):
        for each, text in enumerate(texts):
            whole = text if each != rank else text[:end]
            (tmp_path / f"rank-{each}.json").write_text(whole)
        try:
            analysis = open_trace(tmp_path).analyze()
        except TraceError:
            continue
        read += 1
        walls = [row.wall_us for row in analysis.steps]
        assert max(walls) <= STEP_US + 1, end
        longest = max((row.span_us or 0 for row in analysis.ranks), default=0)
        assert longest <= STEPS * STEP_US, end
    assert read > 10
