"""The stored timeline and analysis of a large trace."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from plotly.utils import PlotlyJSONEncoder

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages import critical_path_page
from ddltrace.dashboard.stored import cache
from ddltrace.dashboard.stored import stored_trace as stored
from ddltrace.dashboard.stored.cache import FOLDER, Cache
from ddltrace.dashboard.timeline import coarse
from ddltrace.dashboard.timeline.frame import Window
from ddltrace.dashboard.timeline.tracks import NO_EVENT
from ddltrace.dashboard.workspace import OpenTrace, Workspace


@pytest.fixture
def large(trace_path, tmp_path, monkeypatch):
    """A trace that counts as large, and a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "FEWEST_EVENTS", 1)
    return trace_path


def as_json(component):
    return json.dumps(component, cls=PlotlyJSONEncoder)


def opened(path: Path) -> OpenTrace:
    return Workspace([open_trace(path)]).get(0)


def shown(trace: OpenTrace) -> tuple[object, ...]:
    """What the pages show of a trace."""
    window = Window(0, trace.timeline.span_ns, 500)
    rows = list(range(len(trace.timeline.rows)))
    return (
        trace.layout(),
        trace.minimap(100),
        trace.frame(window, rows, "layer"),
        trace.analysis.to_json(),
        {name: np.nan_to_num(v).tolist() for name, v in trace.analysis.rank_steps.items()},
        trace.breakdowns,
        trace.path_layout(),
        [trace.event(rank, 0) for rank in trace.trace.ranks],
        trace.notes,
        trace.slack,
    )


def stored_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_a_stored_trace_shows_what_a_read_one_shows(large, monkeypatch):
    fresh = opened(large)
    page = as_json(critical_path_page.critical_path_page(fresh, Address()))
    assert "slack-wanted" in page  # it comes after the page
    built, loaded = shown(fresh), shown(opened(large))
    assert len(stored_files(large / FOLDER)) == 3
    page = as_json(critical_path_page.critical_path_page(opened(large), Address()))
    assert "slack-wanted" not in page
    assert "smallest slack" in page
    assert built == loaded
    shutil.rmtree(large / FOLDER)
    monkeypatch.setattr(stored, "FEWEST_EVENTS", 1 << 60)
    assert shown(opened(large)) == loaded
    assert not (large / FOLDER).exists()


def test_damaged_foreign_and_outdated_files_are_built_again(
    large, tmp_path, write_run_of, monkeypatch
):
    whole = opened(large).layout()
    folder = large / FOLDER
    [name] = stored_files(folder)
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    for bad in (
        b"",
        content[:-1],
        content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        content + b"more",
    ):
        (folder / name).write_bytes(bad)
        assert opened(large).layout() == whole
        assert (folder / name).read_bytes() == content
    # The file of a user with another secret is not read, and stays.
    (tmp_path / "cache" / "ddltrace" / "cache.key").write_bytes(b"k" * 32)
    assert opened(large).layout() == whole
    assert len(stored_files(folder)) == 2
    # That of another version is replaced.
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    own = Cache(open_trace(large))
    assert not own.has("timeline-0of1")
    own.remove_others()
    assert list(stored_files(folder)) == [name]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "FEWEST_EVENTS", 1)
    longer = write_run_of("longer", steps=6)
    shutil.copytree(longer, large, dirs_exist_ok=True)
    assert opened(large).analysis.trace.steps == 6


def test_a_link_out_of_the_trace_is_not_written_through(large, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (large / FOLDER).symlink_to(outside)
    assert opened(large).timeline.rows
    assert not stored_files(outside)
    assert list((tmp_path / "cache" / "ddltrace" / "traces").glob("*/timeline-*.arrow"))


def test_a_trace_is_shown_where_nothing_can_be_stored(large, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert opened(large).timeline.rows
    assert not (large / FOLDER).exists()


def test_a_trace_is_shown_where_files_cannot_be_kept_from_others(large, monkeypatch):
    """Some file systems know no owners."""
    monkeypatch.setattr(cache, "is_private", lambda status: False)
    assert opened(large).timeline.rows
    assert not (large / FOLDER).exists()


def test_arrays_come_back_and_only_numbers_are_stored(large, monkeypatch):
    monkeypatch.setattr(cache, "_BATCH", 100)
    arrays: list[np.ndarray] = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 3)),
        np.array([[True], [False]]),
        np.arange(13, dtype=np.int64),  # longer than a batch
        np.arange(12, dtype=np.uint8)[::2],
    ]
    with Cache(open_trace(large)).writing("kind") as writer:
        writer.finish([writer.add(array) for array in arrays])
        with pytest.raises(TypeError):
            writer.add(np.array([object()]))
    reader = Cache(open_trace(large)).read("kind")
    for array, reference in zip(arrays, reader.document, strict=True):
        found = reader.array(reference)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    [path] = (large / FOLDER).iterdir()
    assert pa.ipc.open_file(path).num_record_batches == 4  # as any program reads it


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_file_that_others_can_write_is_not_read(large, mode):
    own = Cache(open_trace(large))
    with own.writing("kind") as writer:
        writer.finish(None)
    assert own.read("kind") is not None
    [path] = (large / FOLDER).iterdir()
    path.chmod(mode)
    assert own.read("kind") is None


def test_where_files_cannot_be_kept_from_others_the_users_cache_is_taken(large, monkeypatch):
    own, checked = Cache(open_trace(large)), []

    def is_private(status):
        checked.append(status)
        return len(checked) > 1

    monkeypatch.setattr(cache, "is_private", is_private)
    with own.writing("kind") as writer:
        writer.finish(None)
    assert own.read("kind") is not None
    assert not stored_files(large / FOLDER)


def test_several_processes_build_and_read_the_same(large):
    """As several servers of one trace do."""
    code = """
import sys
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.stored import stored_trace
from ddltrace.dashboard.workspace import Workspace

stored_trace.FEWEST_EVENTS = 1
opened = Workspace([open_trace(sys.argv[1])]).get(0)
print(opened.timeline.num_events, opened.analysis.trace.steps, len(opened.slack))
"""
    command = [sys.executable, "-c", code, str(large)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    trace = opened(large)
    expected = trace.timeline.num_events, trace.analysis.trace.steps, len(trace.slack)
    assert printed == {" ".join(map(str, expected)) + "\n"}
    assert len(stored_files(large / FOLDER)) == 3


def test_a_timeline_grows_from_a_sample_to_the_whole(large, monkeypatch):
    asked = []
    monkeypatch.setattr(stored, "_FEWEST_IN_PART", 1)
    monkeypatch.setattr(coarse, "_ROWS", 1)
    trace = opened(large)
    trace._growing._add = lambda timeline, add=trace._growing._add, **whole: (
        add(timeline, **whole),
        asked.append(timeline),
    )
    whole = trace.timeline
    first, *_, last = asked
    assert [track.rank for track in first.tracks] == [track.rank for track in last.tracks]
    assert all((row.event == NO_EVENT).all() for row in first.rows)
    assert last is whole
    assert trace.stages()["whole"]
    assert trace.stages()["stages"] == len(asked) == 3  # a sample, one rank, both ranks
    # Every interval of the sample is one of the trace.
    for before, after in zip(first.rows, whole.rows, strict=False):
        assert set(before.index.start.tolist()) <= set(after.index.start.tolist())
    client = create_app(Workspace([trace.trace])).server.test_client()
    assert client.get("/api/0/layout?stage=9").status_code == 400
    assert client.get("/api/0/stages").get_json()["whole"]
    assert len(list((large / FOLDER).glob("timeline-*.arrow"))) == 2


@pytest.mark.parametrize("stage", [None, 0])
def test_mapped_files_are_released_after_each_row(large, monkeypatch, stage):
    trace = opened(large)
    window, rows = Window(0, trace.timeline.span_ns, 500), [0, 1, 2]
    expected = trace.frame(window, rows)
    released = []

    def release(self):
        released.append(self)

    monkeypatch.setattr(stored, "_MAPPED_BYTES", -1)
    monkeypatch.setattr(stored.Stored, "release", release)
    assert trace.frame(window, rows, stage=stage)[:4] == expected[:4]
    assert len(released) == len(rows)


def test_lines_of_several_threads_are_written_whole(monkeypatch):
    """Otherwise the dashboard reads an empty line now and then, and fails."""
    written = []

    class Output:
        write = written.append
        flush = staticmethod(lambda: None)

    monkeypatch.setattr(stored.sys, "stdout", Output)
    stored.report("12")
    assert written == ["12\n"]
