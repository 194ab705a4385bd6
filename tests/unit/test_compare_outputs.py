"""What `dev.py compare-outputs` shows, and that it compares the revisions that it names."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import compare_outputs
from support.collect_outputs import inputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clone whose working tree has a planted difference."""
    clone = tmp_path / "clone"
    clone.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "package-root", "tracer", "analyzer", "dashboard", "experiments"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (clone / "tests").symlink_to(ROOT / "tests")
    shutil.copytree(ROOT / "sample_traces" / "straggler", clone / "sample_traces" / "straggler")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", *listed], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], cwd=clone, check=True)
    monkeypatch.setattr(compare_outputs, "ROOT", clone)
    return clone


def compare(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare-outputs", *arguments])
    return compare_outputs.main()


def test_shows_a_planted_difference_and_nothing_else(repository, monkeypatch, capsys):
    chosen = ["HEAD", "--output", "query steps", "--output", "doctor --help"]
    assert compare(monkeypatch, *chosen) == 0
    assert capsys.readouterr().out == "\n0 of 4 outputs differ\n"
    commands = repository / "tracer" / "commands.py"
    text = commands.read_text(encoding="utf-8")
    assert "what can be recorded" in text
    commands.write_text(text.replace("what can be recorded", "a plant"), encoding="utf-8")
    assert compare(monkeypatch, *chosen) == 1
    shown = capsys.readouterr().out
    assert "ddltrace: doctor --help\n" in shown
    assert "-  Check what can be recorded on this machine." in shown
    assert "+  Check a plant on this machine." in shown
    assert "1 of 4 outputs differ" in shown


def test_a_revision_that_does_not_exist_is_an_error(repository, monkeypatch):
    assert compare(monkeypatch, "no-such-revision", "--output", "doctor --help") == 2


def test_every_sample_is_an_input(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = set(inputs())
    runs = [path.parent for path in ROOT.glob("sample_traces/**/run.json")]
    assert len(runs) > 3
    assert {str(path.relative_to(ROOT)) for path in runs} <= found
    assert "tests/data/foreign/kineto-cpu" in found


def as_json(value):
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (as_json({"a": 1, "b": [1, 2]}), b'{"b": [1,  2], "a": 1}', []),
        (as_json({"a": {"b": 1}}), as_json({"a": {"b": None}}), ["a.b: 1 -> null"]),
        (as_json({"a": 1}), as_json({"a": 1.0}), ["a: 1 -> 1.0"]),
        (as_json({"a": 1}), as_json({}), ["a: 1 -> absent", "the value: absent -> {}"]),
        (
            as_json([{"x": 1}, {"x": 2}, {"x": 3}]),
            as_json([{"x": 1}, {"x": 4}, {"x": 5}]),
            ["[1].x: 2 -> 4  (and 1 more of [*].x)"],
        ),
        (b"one\ntwo\n", b"one\n2\n", ["@@ -2 +2 @@", "-two", "+2"]),
        (b"\xff\xfe", b"\xff", ["binary: 2 and 1 bytes, which differ"]),
        (None, b"", ["only in the working tree"]),
        (b"one\n" * 3000, b"one\n" * 2999, ["@@ 3000 @@", "-one"]),
    ],
)
def test_differences(before, after, shown):
    assert compare_outputs.differences(before, after) == shown
    assert bool(compare_outputs.differences(after, before)) == bool(shown)


def test_compressed_files_are_compared_without_their_time():
    first, second = (gzip.compress(b'{"a": 1}', mtime=mtime) for mtime in (1, 2))
    assert first != second
    assert compare_outputs.differences(first, second, ".gz") == []
    assert compare_outputs.differences(first, gzip.compress(b'{"a": 2}'), ".gz") == ["a: 1 -> 2"]
