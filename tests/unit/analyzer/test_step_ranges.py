"""Long traces are analyzed in ranges of steps: as if at once, but for rounded medians."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import programs

from ddltrace.analyzer.commands import analyze as analyze_command
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.measures.distribution import Distribution, merged
from ddltrace.analyzer.measures.keyed_sums import KeyedSums
from ddltrace.analyzer.measures.tensors import weighted_medians
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.trace import step_selection
from ddltrace.analyzer.trace.step_selection import RULE_ASKED, StepSelection, divide
from ddltrace.tracer.errors import TraceError

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = [ROOT / "sample_traces" / name for name in ("ddp-4-hosts-400mbit", "straggler")]
KINETO = ROOT / "tests" / "data" / "foreign" / "kineto-cpu"
ROUNDED = 0.005


def in_ranges(path: Path, count: int) -> Trace:
    """The trace with a memory limit that divides it into about so many ranges."""
    trace = open_trace(path)
    trace.memory_limit = 1
    selection = trace.step_selection
    assert selection is not None
    trace = open_trace(path)
    kept = int(selection.sizes.sum())
    trace.memory_limit = min(math.ceil(4 * kept / count), kept - 1)
    assert trace.step_selection is not None
    return trace


def close(one: float | None, other: float | None, within: float = ROUNDED) -> bool:
    return one == other or (
        one is not None and other is not None and abs(one - other) <= within * abs(other) + 1e-6
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
@pytest.mark.parametrize("count", [5, 1000])
def test_what_can_be_added_up_is_the_same(path, count):
    whole, trace = open_trace(path).analyze(), in_ranges(path, count)
    found = trace.analyze()
    assert "were analyzed in" in found.trace.notes[-1]
    assert found.steps == whole.steps
    assert found.clock == whole.clock
    for name, value in vars(whole.summary).items():
        mine = getattr(found.summary, name)
        if isinstance(value, float):
            assert mine == pytest.approx(value), name
        else:
            assert mine == value
    assert found.resources == whole.resources
    for dimension, expected in zip(found.dimensions, whole.dimensions, strict=True):
        assert vars(dimension) | {"groups": 0} == pytest.approx(vars(expected) | {"groups": 0})
    assert found.waiting.total_us == pytest.approx(whole.waiting.total_us)
    assert found.slow_steps == whole.slow_steps
    for mine, other in zip(found.critical_path, whole.critical_path, strict=True):
        assert (mine.rank, mine.category, mine.name) == (other.rank, other.category, other.name)
        assert (mine.us, mine.share) == pytest.approx((other.us, other.share))
    assert [(row.rank, row.category) for row in found.critical_path_by_rank] == [
        (row.rank, row.category) for row in whole.critical_path_by_rank
    ]
    assert [row.us for row in found.critical_path_by_rank] == pytest.approx(
        [row.us for row in whole.critical_path_by_rank]
    )
    lateness = [(row.rank, row.collectives_last, row.late_steps) for row in whole.stragglers]
    assert [(r.rank, r.collectives_last, r.late_steps) for r in found.stragglers] == lateness
    assert {row.name for row in found.tensors} == {row.name for row in whole.tensors}
    exposed = {row.name: row.exposed_us for row in whole.tensors}
    for row in found.tensors:
        assert row.exposed_us == pytest.approx(exposed[row.name])
    assert found.savings is not None
    assert whole.savings is not None
    assert found.savings.imbalance_us == pytest.approx(whole.savings.imbalance_us, rel=0.02)
    if count > len(whole.steps):  # a period for each step, in both
        assert found.tensor_course.keys() == whole.tensor_course.keys()
        for name, course in whole.tensor_course.items():
            assert found.tensor_course[name] == pytest.approx(course), name
    assert found.rank_steps.keys() == whole.rank_steps.keys()
    for name, values in whole.rank_steps.items():
        np.testing.assert_array_equal(found.rank_steps[name], values, name)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_messages_of_all_steps_are_counted_once(path):
    """Compared with all steps at once: what lies outside of steps does not count in ranges."""
    trace = in_ranges(path, 5)
    assert trace.step_selection is not None
    found, whole = trace.analyze(), open_trace(path).analyze(trace.step_selection.whole)
    assert found.joining == whole.joining
    assert found.message_sizes == whole.message_sizes
    assert found.traffic == whole.traffic
    steady = {"step_us_p50", "step_us_p95"}
    for mine, other in zip(found.ranks, whole.ranks, strict=True):
        for name, value in vars(other).items():
            if name not in steady:
                assert getattr(mine, name) == pytest.approx(value) or vars(
                    getattr(mine, name)
                ) == pytest.approx(vars(value)), name
    for mine, other in zip(found.idle, whole.idle, strict=True):
        assert vars(mine) == pytest.approx(vars(other), abs=1e-3)
    for mine, other in zip(found.collectives, whole.collectives, strict=True):
        for name, value in vars(other).items():
            rounded = name.endswith(("_gbps", "wait_us", "transfer_us", "_p95", "skew_us"))
            assert close(getattr(mine, name), value, ROUNDED if rounded else 1e-12), name


@pytest.mark.parametrize("overlapped", [False, True])
def test_savings_and_causes_are_those_of_the_program(build, overlapped):
    late = {(2, "compute"): 900}
    program = programs.data_parallel(7, ranks=4, steps=40, late=late, overlapped=overlapped)
    built, played = build(4), programs.run(program)
    programs.write(built, played)
    found = in_ranges(built.write(), 4).analyze()
    first = found.steps[0].step + found.summary.warmup_steps
    again = programs.run(programs.without_cause(program, "2 compute"))
    steady = 40 - first
    ends = [run.end_of(39) - run.end_of(first - 1) for run in (played, again)]
    saved = (ends[0] - ends[1]) / steady
    cause = found.root_causes[0]
    assert (cause.rank, cause.activity) == (2, "compute")
    assert saved - 2 <= cause.most_us <= 1.1 * saved + 10
    assert found.stragglers[0].rank == 2
    assert found.stragglers[0].saves_us == pytest.approx(saved, rel=0.1)


def test_a_pipeline_has_the_same_bubbles(build):
    program = programs.pipeline(
        3, stage_us=[100, 160, 100], steps=24, microbatches=4, link_us={1: 30}
    )
    built = build(3)
    programs.write(built, programs.run(program))
    path = built.write()
    (whole,), (found,) = (
        trace.analyze().pipelines for trace in (open_trace(path), in_ranges(path, 5))
    )
    assert (found.ranks, found.microbatches) == (whole.ranks, whole.microbatches) == ((0, 1, 2), 4)
    assert found.bubble_share == pytest.approx(whole.bubble_share)
    for mine, other in zip(found.stages, whole.stages, strict=True):
        assert mine.forward_us == pytest.approx(other.forward_us)
        assert mine.work_us == pytest.approx(other.work_us)
    links = {(row.src, row.dst): row for row in open_trace(path).analyze().p2p}
    for row in in_ranges(path, 5).analyze().p2p:
        link = links[row.src, row.dst]
        assert (row.count, row.bytes, row.wait_us) == (link.count, link.bytes, link.wait_us)
        assert close(row.transfer_us_p95, link.transfer_us_p95)


def _training(built, steps=30, sizes=()):
    """One collective in each step, whose bytes are those of `sizes` in the first steps."""
    for rank in built.ranks:
        for step in range(steps):
            built[rank].step, at = step, 1000 * step + 10 * rank
            size = sizes[step] if step < len(sizes) else 64
            built[rank].add("phase", at, at + 500, name="forward")
            message = built[rank].message("all_reduce", at + 500, at + 700, seq=step, bytes=size)
            built[rank].wait(at + 500, at + 700, message)
            built[rank].whole_step(step, at, at + 900)


def test_warmup_may_end_within_a_range(build):
    built = build(2)
    _training(built, sizes=(64, 128, 64, 128))
    path = built.write()
    whole, found = open_trace(path).analyze(), in_ranges(path, 3).analyze()
    assert [row.steady for row in found.steps] == [row.steady for row in whole.steps]
    assert found.summary == whole.summary
    assert found.summary.warmup_steps == 4
    assert [(row.bytes, row.count) for row in found.collectives] == [
        (row.bytes, row.count) for row in whole.collectives
    ]
    assert found.stragglers[0].collectives_last == 26


def test_a_hang_at_the_end_is_found(build):
    built = build(2)
    _training(built)
    built[0].step = 30
    built[0].message("all_reduce", 31_000, None, seq=30, bytes=64)
    built[1].step = 30
    built[1].add("phase", 31_000, 40_000, name="forward")
    path = built.write()
    whole, found = open_trace(path).analyze(), in_ranges(path, 6).analyze()
    assert found.hangs == whole.hangs
    assert [(hang.entered, hang.missing) for hang in found.hangs] == [((0,), (1,))]
    assert found.trace.steps == 30


def test_a_rank_that_ended_early_is_described(build):
    """Its last events are in a range before the last one."""
    built = build(2)
    _training(built, steps=12)
    for step in range(12, 40):
        built[0].step, at = step, 1000 * step
        built[0].message("all_reduce", at + 500, at + 700, seq=step, bytes=64)
        built[0].whole_step(step, at, at + 900)
    built[1].info_changes = {"status": "killed", "exit_status": 137, "ended_ns": 38_000_000}
    built[0].info_changes = {"status": "failed", "exit_status": 1, "ended_ns": 41_000_000}
    path = built.write()
    whole, found = open_trace(path).analyze(), in_ranges(path, 8).analyze()
    assert whole.failure is not None
    assert found.failure == whole.failure
    assert "step 11" in found.failure.doing
    for name in ("sync_overhead_share", "overlap_ratio", "compute_share", "idle_share"):
        assert getattr(found.summary, name) == pytest.approx(getattr(whole.summary, name)), name
    assert found.waiting.total_us == pytest.approx(whole.waiting.total_us)


def test_steps_that_were_asked_for_may_be_too_many_as_well(build):
    built = build(2)
    _training(built)
    trace = in_ranges(built.write(), 10)
    found = trace.analyze(range(3, 27))
    assert [row.step for row in found.steps] == list(range(3, 27))
    assert (found.summary.steps, found.summary.rule) == (24, RULE_ASKED)
    assert "steps 3 to 26 were analyzed in" in found.trace.notes[-1]
    assert [row.messages for row in found.ranks] == [24, 24]
    few = trace.analyze(range(3, 5))
    assert [row.step for row in few.steps] == [3, 4]
    assert not any("ranges" in note for note in few.trace.notes)
    with pytest.raises(TraceError, match="has steps 0 to 29, none of 50:60"):
        trace.analyze(range(50, 60))


def test_operations_are_added_up(tmp_path):
    whole = formats.read(KINETO)
    trace = Trace(KINETO, whole.run, whole.tables)
    trace.memory_limit = 50_000
    assert trace.step_selection is not None
    assert len(divide(trace.step_selection)) == 2
    found, other = trace.analyze(), Trace(KINETO, whole.run, whole.tables)
    steps = other.analyze(trace.step_selection.whole)
    assert [(r.name, r.count, r.device_us) for r in found.operators] == [
        (r.name, r.count, pytest.approx(r.device_us)) for r in steps.operators
    ]
    for mine, one in zip(found.operators, steps.operators, strict=True):
        assert mine.self_us == pytest.approx(one.self_us)
        assert mine.per_step_us == pytest.approx(one.per_step_us)
        assert [(p.rank, p.count) for p in mine.ranks] == [(p.rank, p.count) for p in one.ranks]


def test_reports_of_a_long_trace(build, tmp_path, monkeypatch):
    built = build(2)
    _training(built)
    path = built.write()
    monkeypatch.setattr(step_selection, "MOST_BYTES", in_ranges(path, 6).memory_limit)
    page = tmp_path / "page.html"
    arguments = [str(path), "--html", str(page)]
    done = CliRunner().invoke(analyze_command, arguments)
    assert done.exit_code == 0, done.output
    assert "were analyzed in" in done.stdout
    assert "were analyzed in" in page.read_text()
    done = CliRunner().invoke(analyze_command, [*arguments[:1], "--json"])
    assert len(json.loads(done.stdout)["steps"]) == 30


def test_a_task_gets_only_its_events(build):
    built = build(1)
    for step in range(10):
        built[0].step = step
        built[0].whole_step(step, 100 * step, 100 * step + 90)
        built[0].step = None
        built[0].add("marker", 100 * step + 95, 100 * step + 96, name=f"between {step}")
    trace = built.trace()
    for part, names in (
        (trace.of_steps(range(2, 4), later_stepless=False), [2, 3]),
        (trace.of_steps(range(2, 4), later_stepless=True), range(2, 10)),
    ):
        for each in (part, pickle.loads(pickle.dumps(part))):
            events = each.events(0)
            found = [name for name in events["name"].to_pylist() if "between" in name]
            assert found == [f"between {number}" for number in names]
            assert set(events["step"].drop_null().to_pylist()) == {2, 3}


def test_a_trace_without_completed_steps_is_told(build):
    built = build(1)
    for step in range(5):
        built[0].step = step
        built[0].add("phase", 100 * step, 100 * step + 90, name="forward")
    with pytest.raises(TraceError, match="has no completed steps"):
        in_ranges(built.write(), 3).analyze()


def _selection(sizes: list[float], most_bytes: int) -> StepSelection:
    numbers = np.arange(10, 10 + len(sizes))
    whole = range(10, 10 + len(sizes))
    return StepSelection(whole, "", whole, 1, 0, numbers, np.array(sizes), most_bytes=most_bytes)


def test_ranges_contain_every_step_once():
    sizes = [5.0, 1, 1, 1, 9, 1, 1, 1, 1, 1]
    ranges = divide(_selection(sizes, 12))
    assert ranges == [range(10, 11), range(11, 14), range(14, 15), range(15, 18), range(18, 20)]
    assert divide(_selection([3.0], 1)) == [range(10, 11)]
    missing = replace(_selection([1.0, 1, 1], 1000), numbers=np.array([10, 15, 30]))
    assert divide(replace(missing, steps=range(10, 31))) == [range(10, 15), range(15, 31)]


def test_a_rounded_distribution_is_near_the_exact_one():
    values = np.random.default_rng(1).lognormal(8, 2, 20_001)
    values[:100] = 0
    exact, rounded = Distribution(values), Distribution(values).rounded()
    assert len(rounded) == len(exact) == 20_001
    assert len(rounded.values) < 3000
    for percent in (0, 1, 50, 95, 100):
        assert close(rounded.percentile(percent), exact.percentile(percent), 0.0051)
    assert close(rounded.median(), exact.median(), 0.0051)
    assert Distribution(np.empty(0)).median() is None
    assert Distribution(np.empty(0)).rounded().percentile(95) is None


def test_a_merged_distribution_does_not_depend_on_how_it_was_divided():
    values = np.random.default_rng(2).exponential(100, 5000) - 20
    found = [
        merged([Distribution(part) for part in np.array_split(values, count)]).percentile(95)
        for count in (2, 3, 50)
    ]
    assert found == [found[0]] * 3
    assert merged([Distribution(values)]).percentile(95) == np.percentile(values, 95)
    assert len(merged([])) == 0


def test_weighted_medians():
    values = np.array([[1.0, np.nan, 3], [2, np.nan, np.nan], [9, np.nan, 5]])
    found = weighted_medians(values, np.array([1.0, 1, 1]))
    assert found.tolist()[:1] + found.tolist()[2:] == [2, 4]
    assert np.isnan(found[1])
    assert weighted_medians(values, np.array([1.0, 1, 5]))[0] == 9


def test_sums_by_key_know_what_is_unknown():
    sums: KeyedSums[int] = KeyedSums(2)
    for start in range(0, 200, 50):
        sums.add(list(range(start, start + 100)), [(1, None)] * 100, 2)
    sums.add([7], [(None, 5)])
    found = dict(sums.items())
    assert len(found) == 250
    assert (found[7], found[60], found[249]) == ([2, 5], [4, None], [2, None])
