"""Perfetto itself opens what is exported: lanes, nesting and arrows, in both of its formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.made_trace import HOSTILE, made_trace
from support.perfetto_engine import PerfettoEngine

from ddltrace.analyzer.exporters import export
from ddltrace.analyzer.open_trace import Trace, open_trace

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
REAL = [
    *sorted(path.parent for path in (ROOT / "sample_traces").glob("*/run.json")),
    ROOT / "tests" / "data" / "foreign" / "kineto-cpu",
    ROOT / "tests" / "data" / "foreign" / "flight-recorder",
]
FORMATS = ["chrome", "perfetto"]


@contextmanager
def opened(browser: Any, trace: Trace, to: str, folder: Path) -> Iterator[PerfettoEngine]:
    path = folder / f"exported-{to}"
    export(trace, to, path)
    engine = PerfettoEngine(browser, path)
    yield engine
    engine.close()


def complaints(engine: PerfettoEngine) -> list[tuple[Any, ...]]:
    return engine.query("SELECT name, value FROM stats WHERE value > 0 AND severity != 'info'")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", REAL, ids=lambda path: path.name)
@pytest.mark.long
def test_real_traces_arrive_whole(source: Path, to: str, browser: Any, tmp_path: Path) -> None:
    trace = open_trace(source)
    with opened(browser, trace, to, tmp_path) as engine:
        assert complaints(engine) == []
        lanes = engine.query(
            "SELECT COUNT(*), SUM(dur), MIN(dur), MIN(ts), COUNT(DISTINCT track_id) FROM slice"
        )
        [(slices, total, shortest, first, _)] = lanes
        [(arrows, backwards)] = engine.query(
            "SELECT COUNT(*), COALESCE(SUM(a.ts > b.ts + b.dur), 0) FROM flow "
            "JOIN slice a ON a.id = slice_out JOIN slice b ON b.id = slice_in"
        )
        processes = engine.query("SELECT DISTINCT name FROM process WHERE name IS NOT NULL")
        outside = engine.query(
            "SELECT COUNT(*) FROM slice child JOIN slice around ON around.id = child.parent_id "
            "WHERE child.ts < around.ts OR child.ts + child.dur > around.ts + around.dur"
        )
    tables = [trace.events(rank) for rank in trace.ranks]
    assert slices == sum(table.num_rows for table in tables)
    lengths = [
        end - start
        for table in tables
        for start, end in zip(
            table["start_ns"].to_pylist(), table["end_ns"].to_pylist(), strict=True
        )
        if end is not None
    ]
    if len(lengths) == slices:
        assert total == sum(lengths)
    assert shortest >= 0
    assert first == 0
    assert backwards == 0
    assert outside == [(0,)]
    assert {name for (name,) in processes} >= {f"rank {rank}" for rank in trace.ranks}
    if trace.run.source == "ddltrace":
        assert arrows > 0


@pytest.mark.parametrize("to", FORMATS)
def test_lanes_arrows_and_details_are_shown(to: str, browser: Any, tmp_path: Path) -> None:
    with opened(browser, made_trace(), to, tmp_path) as engine:
        assert complaints(engine) == []
        names = "thread.name" if to == "chrome" else "track.name"
        lanes = engine.query(
            f"SELECT {names} AS lane, category, COUNT(*) AS events FROM slice "
            "JOIN track ON track.id = track_id "
            "LEFT JOIN thread_track ON thread_track.id = track.id "
            "LEFT JOIN thread USING (utid) GROUP BY 1, 2"
        )
        arrows = engine.query(
            "SELECT a.category AS source, a.name AS source_name, b.name AS target FROM flow "
            "JOIN slice a ON a.id = slice_out JOIN slice b ON b.id = slice_in"
        )
        nested = engine.query(
            "SELECT child.category AS inner_kind, around.category AS outer_kind "
            "FROM slice child JOIN slice around ON around.id = child.parent_id "
            "WHERE child.category IN ('phase', 'layer')"
        )
        details = engine.query(
            "SELECT args.key AS key, args.display_value AS value FROM slice "
            "JOIN args USING (arg_set_id) WHERE slice.name = 'bucket 0'"
        )
    # Messages that overlap have a lane of their own.
    assert sorted(lanes) == [
        ("comm/0", "message", 6),
        ("comm/0 (2)", "message", 2),
        ("main", "gradient", 4),
        ("main", "layer", 2),
        ("main", "phase", 2),
        ("main", "step", 2),
    ]
    assert sorted(arrows) == sorted(
        [
            *[("gradient", "layer1.weight", "bucket 0")] * 2,
            *[("gradient", HOSTILE, "bucket 1")] * 2,
            ("message", "bucket 2", "bucket 2"),
        ]
    )
    assert set(nested) == {("phase", "step"), ("layer", "phase")}
    reported = {key.rpartition(".")[2]: value for key, value in details}
    assert (reported["bytes"], reported["op"], reported["tensors"]) == (
        "16",
        "all_reduce",
        "layer1.weight",
    )
