"""Digests of files are remembered only as long as the files have not changed."""

import os

import pytest

from ddltrace.dashboard.stored import verified_files
from ddltrace.dashboard.stored.verified_files import VerifiedFiles


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def note(tmp_path, file, monkeypatch):
    monkeypatch.setattr(verified_files, "_SETTLED_NS", 0)
    path = tmp_path / "folder" / "note.json"
    verified = VerifiedFiles(path)
    verified.learn(file, verified.state(file), "digest")
    verified.save()
    return path


def test_an_unchanged_file_is_known_in_the_next_start(file, note, tmp_path):
    assert VerifiedFiles(note).known(file) == "digest"
    assert VerifiedFiles(note).known(tmp_path) is None


def rewritten(path):
    """Other content of the same size, with the former times."""
    status = path.stat()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_a_changed_file_is_not_known(file, note, change):
    change(file)
    assert VerifiedFiles(note).known(file) is None


def test_a_file_that_was_changed_just_before_is_not_remembered(file, note, monkeypatch):
    monkeypatch.setattr(verified_files, "_SETTLED_NS", 1 << 60)
    verified = VerifiedFiles(note.with_name("other"))
    verified.learn(file, verified.state(file), "digest")
    assert verified.known(file) is None


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1, "files": {"a": 1}}', "\x00"])
def test_a_damaged_note_knows_nothing(file, note, content):
    note.write_text(content)
    assert VerifiedFiles(note).known(file) is None


def test_a_note_that_others_can_write_knows_nothing(file, note):
    note.chmod(0o666)
    assert VerifiedFiles(note).known(file) is None


def test_a_cache_that_cannot_be_written_is_no_error(file, monkeypatch):
    monkeypatch.setattr(verified_files, "_SETTLED_NS", 0)
    verified = VerifiedFiles(file / "note.json")
    verified.learn(file, verified.state(file), "digest")
    verified.save()
    assert verified.known(file) == "digest"
