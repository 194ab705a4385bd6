"""Samples, tokens and floating-point operations of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, on_ranks, run, traced

from ddltrace.analyzer.open_trace import open_trace


@pytest.mark.long
def test_a_job_is_counted_as_it_counts_itself(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    options = ("--level", "op", "--op-steps", "3:6")
    done = run(traced(trace, on_ranks("trains_on_tokens.py"), *options), cwd=tmp_path)
    assert done.status == 0, done.stderr
    (flops,) = {int(line.removeprefix("flops ")) for line in done.stdout.splitlines()}
    command = [*DDLTRACE, "analyze", str(trace), "--json", "--peak-tflops", "0.001"]
    document = json.loads(run(command, cwd=tmp_path).stdout)
    assert document["trace"]["notes"] == []
    summary = document["summary"]
    assert summary["flops_per_step"] == flops
    assert summary["mfu"] == pytest.approx(flops / summary["rank_step_us"]["mean"] / 1e3)
    first = summary["warmup_steps"]
    for rank in document["ranks"]:
        events = open_trace(trace).events(rank["rank"]).to_pandas()
        fetched = events[events.kind == "data"]
        assert fetched.samples.tolist() == [4] * 8
        assert fetched.tokens.tolist() == [48] * 8
        counted = events[events.flops.notna()]
        assert set(counted.step) == {3, 4, 5}
        assert set(counted.kind) == {"host"}
        steps = events[(events.kind == "step") & (events.step >= first)]
        seconds = (steps.end_ns - steps.start_ns).sum() / 1e9
        # The last step fetches nothing.
        batches = len(steps) - 1
        assert rank["samples_per_s"] == pytest.approx(batches * 4 / seconds)
        assert rank["tokens_per_s"] == pytest.approx(batches * 48 / seconds)
    of_ranks = sum(rank["tokens_per_s"] for rank in document["ranks"])
    assert summary["tokens_per_s"] == pytest.approx(of_ranks)
    ranged = open_trace(trace)
    ranged.memory_limit = 500_000
    found = ranged.analyze()
    assert "were analyzed in" in found.trace.notes[-1]
    for name in ("samples_per_s", "tokens_per_s", "flops_per_step"):
        assert getattr(found.summary, name) == pytest.approx(summary[name])
    assert [row.samples_per_s for row in found.ranks] == [
        row["samples_per_s"] for row in document["ranks"]
    ]
