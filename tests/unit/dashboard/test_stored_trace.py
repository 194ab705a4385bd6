"""The stored timeline and analysis of a large trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from plotly.utils import PlotlyJSONEncoder

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages import critical_path_page
from ddltrace.dashboard.stored import builder, container
from ddltrace.dashboard.stored import stored_trace as stored
from ddltrace.dashboard.stored.container import ArrayReader, ArrayWriter, InvalidCacheError
from ddltrace.dashboard.stored.place import FOLDER
from ddltrace.dashboard.stored.verified_files import VerifiedFiles
from ddltrace.dashboard.timeline import coarse
from ddltrace.dashboard.timeline.frame import Window
from ddltrace.dashboard.timeline.tracks import NO_EVENT
from ddltrace.dashboard.workspace import OpenTrace, Workspace

KEY = b"k" * 32
NOTHING = VerifiedFiles(Path("/nowhere/note"))


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


def test_damaged_foreign_and_outdated_files_are_built_again(large, tmp_path, write_run_of):
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
    # A file that another user's key signed is not believed.
    (tmp_path / "cache" / "ddltrace" / "cache.key").write_bytes(KEY)
    assert opened(large).layout() == whole
    assert len(stored_files(folder)) == 2
    longer = write_run_of("longer", steps=6)
    shutil.copytree(longer, large, dirs_exist_ok=True)
    assert opened(large).analysis.trace.steps == 6


def test_a_link_out_of_the_trace_is_not_written_through(large, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (large / FOLDER).symlink_to(outside)
    assert opened(large).timeline.rows
    assert not stored_files(outside)
    assert list((tmp_path / "cache" / "ddltrace" / "traces").glob("*/timeline-*.bin"))


def test_a_trace_is_shown_where_nothing_can_be_stored(large, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert opened(large).timeline.rows
    assert not (large / FOLDER).exists()


def test_arrays_come_back_and_only_numbers_are_stored(tmp_path):
    path = tmp_path / "file"
    arrays: list[np.ndarray] = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 3)),
        np.array([[True], [False]]),
    ]
    with open(path, "wb") as file:
        writer = ArrayWriter(file, KEY)
        writer.finish([writer.add(array) for array in arrays])
        with pytest.raises(TypeError):
            writer.add(np.array([object()]))
    reader = ArrayReader(path, KEY, NOTHING)
    for array, reference in zip(arrays, reader.document, strict=True):
        found = reader.array(reference)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    with pytest.raises(InvalidCacheError):
        ArrayReader(path, b"another" * 4, NOTHING)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o606])
def test_a_file_that_others_can_write_needs_more_than_its_checksum(tmp_path, monkeypatch, mode):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        writer = ArrayWriter(file, KEY)
        writer.finish(writer.add(np.arange(100)))
    path.chmod(mode)
    reader = ArrayReader(path, KEY, NOTHING)
    assert reader.array(reader.document).tolist() == list(range(100))
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidCacheError, match="damaged"):
        ArrayReader(path, KEY, NOTHING)
    # As if the changed array had the same checksum.
    _, _, _, checksum, _, _ = container._HEADER.unpack_from(content)
    monkeypatch.setattr(container, "_checksum_of", lambda file: checksum)
    if mode == 0o600:
        ArrayReader(path, KEY, NOTHING)  # nobody else can have made it so
    else:
        with pytest.raises(InvalidCacheError, match="not this user's"):
            ArrayReader(path, KEY, NOTHING)


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
    assert len(list((large / FOLDER).glob("timeline-*.bin"))) == 2


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

    monkeypatch.setattr(builder.sys, "stdout", Output)
    builder.report("12")
    assert written == ["12\n"]
