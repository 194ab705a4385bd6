"""Directories that are of different jobs are not taken for one; the real ones: test_launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import ddltrace
from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.open_trace import open_as_one, open_trace
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import RUN_FILE, segment_name
from ddltrace.tracer.trace.trace_parts import merge

SECOND = 10**9


def _part(
    build_class,
    path: Path,
    rank: int,
    began_s: int,
    *,
    world_size: int = 2,
    hangs: bool = False,
    helper: bool = False,
) -> Path:
    """The directory of one node: one rank's events, and when its launcher ran."""
    builder = build_class(path, world_size)
    builder.ranks = {rank: builder.ranks[rank]}
    builder[rank].message("all_reduce", 10 + rank, 50, seq=0, bytes=4)
    if hangs:
        builder[rank].message("all_reduce", 60 + rank, None, seq=1, bytes=4)
    if helper:
        builder[rank].info_changes = {"clock": {"unix_ns": 0, "monotonic_ns": 1_000}}
        # Of another process of the node, which began in the middle of the rank's work.
        own = builder.ranks[world_size] = type(builder[rank])(0)
        own.info_changes = {
            "rank": 0,
            "segment": segment_name(rank=0, attempt=0, pid=9),
            "pid": 9,
            "world_size": 1,
            "clock": {"unix_ns": 0, "monotonic_ns": 5_000},
        }
        own.add("layer", 30, 900, name="evaluate")
    builder.write()
    run = json.loads((path / RUN_FILE).read_text())
    run["created_unix_ns"], run["ended_unix_ns"] = began_s * SECOND, (began_s + 100) * SECOND
    (path / RUN_FILE).write_text(json.dumps(run))
    return path


def test_nodes_of_one_job_are_one_trace(build_class, tmp_path):
    nodes = [_part(build_class, tmp_path / f"n{rank}", rank, 1000 + rank) for rank in (0, 1)]
    with open_as_one(nodes) as trace:
        assert trace.name == "n0+n1"
        analysis = trace.analyze()
    assert analysis.trace.ranks == (0, 1)
    assert (analysis.joining.collectives, analysis.joining.complete) == (1, 1)


def test_a_job_that_a_helper_formed_beside_is_left_out(build_class, tmp_path):
    nodes = [_part(build_class, tmp_path / "n0", 0, 1000)]
    nodes.append(_part(build_class, tmp_path / "n1", 1, 1001, helper=True))
    with open_as_one(nodes) as trace:
        assert any("process 9 was rank 0 of 1 in a job of its own" in note for note in trace.notes)
        analysis = trace.analyze()
    assert (analysis.joining.collectives, analysis.joining.complete) == (1, 1)
    assert analysis.ranks[0].compute_us is None
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(nodes, merged)
    assert open_trace(merged).analyze().joining == analysis.joining


def test_how_long_ranks_hung_is_told_by_the_clock_of_the_host_that_saw_the_end(
    build_class, tmp_path
):
    # The second host's clock on the wall is 10 s ahead, and its launcher is the last to end.
    for rank, ahead_s in ((0, 0), (1, 10)):
        path = _part(build_class, tmp_path / f"n{rank}", rank, 1000 + ahead_s, hangs=True)
        run = read_run(path)
        (info,) = run.ranks
        info.host = run.host = f"host-{rank}"
        info.clock = {"unix_ns": (1097 + ahead_s) * SECOND, "monotonic_ns": 0}
        write_run(path, run)
    with open_as_one([tmp_path / "n0", tmp_path / "n1"]) as trace:
        (hang,) = trace.analyze().hangs
    # Launchers end 3 s after the ranks' clocks began, which both entered by 61 us.
    assert hang.waited_us == pytest.approx(3e6, rel=1e-3)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"rank": 0, "began_s": 1000}, "both hold rank 0"),
        ({"rank": 2, "began_s": 1000, "world_size": 4}, "of a job of 2 ranks"),
        ({"rank": 1, "began_s": 1161}, "ended 61 s before"),
    ],
)
def test_what_is_not_of_one_job_is_refused_in_one_line(build_class, tmp_path, second, message):
    nodes = [
        _part(build_class, tmp_path / "a", 0, 1000),
        _part(build_class, tmp_path / "b", **second),
    ]
    result = CliRunner().invoke(analyze, [str(path) for path in nodes])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def test_the_python_api_opens_several_as_one(build_class, tmp_path):
    nodes = [_part(build_class, tmp_path / f"n{rank}", rank, 1000 + rank) for rank in (0, 1)]
    trace = ddltrace.open(nodes)
    assert trace.analyze().joining.complete == 1
    assert ddltrace.open(nodes[:1]).ranks == [0]
    # A view outlives the trace that it was made of.
    view = ddltrace.open([str(node) for node in nodes]).of_rank(1)
    assert view.events(1).num_rows == 1


@pytest.mark.parametrize("paths", [(5), (None), ([5]), (b"x"), (["a", None])])
def test_what_is_no_path_is_refused(paths):
    with pytest.raises(TypeError, match="by a path or a list of paths"):
        ddltrace.open(paths)


def test_no_paths_are_refused():
    with pytest.raises(UsageError, match="empty"):
        ddltrace.open([])


@pytest.mark.parametrize(
    "steps", [range(0, 30, 2), range(9, 0, -1), [1, 2], 3, (0, 5), slice(0, 5)]
)
def test_steps_that_are_not_consecutive_are_refused(build_class, tmp_path, steps):
    trace = ddltrace.open(_part(build_class, tmp_path / "n0", 0, 1000))
    for use in (trace.analyze, trace.within):
        with pytest.raises(UsageError, match="consecutive"):
            use(steps)
