"""Directories that are of different jobs are not taken for one; the real ones: test_launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.several import open_as_one
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.store import RUN_FILE

SECOND = 10**9


def _part(build_class, path: Path, rank: int, began_s: int, *, world_size: int = 2) -> Path:
    """The directory of one node: one rank's events, and when its launcher ran."""
    builder = build_class(path, world_size)
    builder.ranks = {rank: builder.ranks[rank]}
    builder[rank].message("all_reduce", 10 + rank, 50, seq=0, bytes=4)
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
