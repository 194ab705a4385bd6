"""Marks on the timeline, kept beside the trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ddltrace
from ddltrace.dashboard.stored import marks
from ddltrace.dashboard.stored.marks import FILE, LONGEST, MOST, load_marks, save_marks
from ddltrace.tracer.trace.removal import is_file_of_trace

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "straggler"


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(SAMPLE, tmp_path / "trace")
    return ddltrace.open(tmp_path / "trace")


def test_they_are_kept_beside_the_trace_and_go_with_it(trace):
    assert load_marks(trace) == []
    save_marks(trace, [{"t": 7, "text": "late"}, {"t": 3, "text": "<b>&"}])
    assert load_marks(ddltrace.open(trace.path)) == [
        {"t": 3, "text": "<b>&"},
        {"t": 7, "text": "late"},
    ]
    assert (trace.path / FILE).is_file()
    assert is_file_of_trace(FILE)  # ddltrace run --force removes it with the trace
    save_marks(trace, [])
    assert load_marks(trace) == []


def test_where_the_trace_cannot_be_written_they_are_kept_for_the_user(trace, monkeypatch):
    write = marks.write_json_atomically

    def refuse(path, value, **options):
        if path.parent == trace.path:
            raise PermissionError(13, "Permission denied")
        write(path, value, **options)

    monkeypatch.setattr(marks, "write_json_atomically", refuse)
    save_marks(trace, [{"t": 1, "text": "mine"}])
    assert not (trace.path / FILE).exists()
    assert load_marks(trace) == [{"t": 1, "text": "mine"}]
    (trace.path / FILE).write_text(json.dumps({"marks": [{"t": 2, "text": "of its owner"}]}))
    assert load_marks(trace) == [{"t": 1, "text": "mine"}]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(trace.path.parent / "cache"))
    save_marks(trace, [{"t": 3, "text": "both"}])
    assert load_marks(trace) == [{"t": 3, "text": "both"}]


def test_what_is_no_mark_is_ignored(trace, tmp_path):
    good = {"t": 5, "text": "x" * 1000}
    bad = [
        {"t": -1, "text": "a"},
        {"t": 1 << 60, "text": "a"},
        {"t": True, "text": "a"},
        {"t": 2.5, "text": "a"},
        {"t": 4, "text": None},
        {"t": 4},
        [5, "a"],
        "mark",
        None,
    ]
    (trace.path / FILE).write_text(json.dumps({"marks": [*bad, good]}))
    assert load_marks(trace) == [{"t": 5, "text": "x" * LONGEST}]
    many = [{"t": time, "text": ""} for time in range(10 * MOST)]
    (trace.path / FILE).write_text(json.dumps({"marks": many}))
    assert len(load_marks(trace)) == MOST
    for content in ("", "{", "[]", "{}", '{"marks": 3}', "\x00" * 100):
        (trace.path / FILE).write_text(content)
        assert load_marks(trace) == []


def test_a_link_in_the_place_of_the_file_is_neither_read_nor_written_through(trace, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps({"marks": [{"t": 1, "text": "secret"}]}))
    (trace.path / FILE).symlink_to(elsewhere)
    assert load_marks(trace) == []
    before = elsewhere.read_text()
    save_marks(trace, [{"t": 2, "text": "own"}])
    assert elsewhere.read_text() == before
    assert load_marks(trace) == [{"t": 2, "text": "own"}]
