"""Our times and torch.profiler's, of the same things in the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.jobs import at_once, on_ranks, run, traced
from support.truth import differences

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run


@pytest.mark.long
def test_both_see_the_same_collectives_and_layers(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", on_ranks("profiled.py", str(tmp_path))), cwd=tmp_path)
    assert done.status == 0, done.stderr
    found = {d.what: d for d in differences(tmp_path / "trace", tmp_path)}
    # Two ranks, 20 steps: two buckets and one all-reduce by hand; two convolutions.
    assert len(found["all_reduce"].start_us) == 2 * 20 * 3
    assert len(found["conv2d"].start_us) == 2 * 20 * 2
    # A layer begins before its operator and ends after it; both on clocks that agree to
    # some microseconds, for most of them.
    layer = found["conv2d"]
    assert np.median(layer.start_us) < 5
    assert np.median(layer.end_us) > -5
    # Ours starts when the host hands the message over, so not after the profiler's span.
    assert np.median(found["all_reduce"].start_us) < 5
    assert np.median(found["all_reduce"].end_us) > -5


@pytest.mark.long
def test_both_see_the_same_bytes_from_rank_to_rank(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    job = on_ranks("profiled_routing.py", str(profiles))
    done = run(traced(tmp_path / "trace", job), cwd=tmp_path)
    assert done.status == 0, done.stderr
    save(formats.read(profiles), tmp_path / "imported", force=False)
    ours, theirs = (
        [
            [tuple(row.values()) for row in messages.to_pylist()]
            for rank in (0, 1)
            for messages in [_sizes(tmp_path / name, rank)]
        ]
        for name in ("trace", "imported")
    )
    assert ours == theirs
    assert [row[-1] for row in ours[1]] == [[7 * 64, 2 * 64]] * 3 + [None, None]


def _sizes(trace: Path, rank: int) -> pa.Table:
    """Operations and bytes of a rank's messages, in order, without those that start the job."""
    events = open_trace(trace).events(rank)
    events = events.filter(pc.is_in(events["op"], pa.array(["all_to_all", "all_gather"])))
    return events.select(["op", "bytes", "out_bytes", "split_bytes"])


@pytest.mark.long
def test_level_op_sees_operators_in_its_window_only(tmp_path: Path) -> None:
    command = on_ranks("ddp_cnn.py", "8")
    sampled = traced(tmp_path / "trace", command, "--level", "op", "--op-steps", "3:5")
    plain, done = at_once(lambda: run(command, cwd=tmp_path), lambda: run(sampled, cwd=tmp_path))
    assert done.losses() == plain.losses()
    for info in read_run(tmp_path / "trace").ranks:
        assert info.errors == []
        frame = read_events(tmp_path / "trace", info.segment)[0].to_pandas()
        operators = frame[frame.kind == "host"]
        assert set(operators.step) == {3, 4}
        convolutions = operators[operators.name == "aten::conv2d"]
        assert len(convolutions) == 2 * 5


@pytest.mark.long
def test_a_job_measures_what_its_recording_costs(tmp_path: Path) -> None:
    command = on_ranks("ddp_cnn.py", "224")
    done = run(traced(tmp_path / "trace", command, "--measure-cost", "40"), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert "12 steps with and without recording: a step takes" in done.stderr
    infos = read_run(tmp_path / "trace").ranks
    recorded = []
    for info in infos:
        assert info.errors == []
        assert info.cost is not None
        assert info.cost["steps"] == 12
        assert info.cost["low"] <= info.cost["ratio"] <= info.cost["high"]
        frame = read_events(tmp_path / "trace", info.segment)[0].to_pandas()
        recorded.append(sorted(frame[frame.kind == "step"].step))
        messages = frame[frame.kind == "message"].drop_duplicates("id", keep="last")
        assert set(messages.step.dropna()) == set(recorded[-1])
        keys = messages[["group", "seq"]]
        assert not keys.duplicated().any()
    assert recorded[0] == recorded[1]
    assert len(recorded[0]) == 224 - 12
    # What was left out does not count as idle.
    analysis = open_trace(tmp_path / "trace").analyze()
    assert any("12 steps were left unrecorded" in note for note in analysis.trace.notes)
    for info, row in zip(infos, analysis.ranks, strict=True):
        frame = read_events(tmp_path / "trace", info.segment)[0].to_pandas()
        steps = frame[frame.kind == "step"].sort_values("step")
        jumps = steps.step.diff() > 1
        left_out = (steps.start_ns - steps.end_ns.shift())[jumps].sum()
        whole = frame.end_ns.max() - frame.start_ns.min()
        assert row.span_us is not None
        assert row.span_us * 1e3 <= whole - left_out
