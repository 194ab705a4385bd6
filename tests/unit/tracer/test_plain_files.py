"""Only plain files inside a trace are read and copied, and no one may read more of a copy."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.cli import cli
from ddltrace.experiments.harness import results_file
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.plain_files import copy_plain, open_plain
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import PARTS_LABEL, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import joined_directory, parts_of

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "sample_traces" / "straggler"
SECRET = b"-----BEGIN PRIVATE KEY-----"


def a_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        # Names of sockets are short.
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


def a_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def an_endless_link(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_a_folder(path: Path, secret: Path) -> None:
    path.symlink_to(secret.parent)


KINDS = [a_pipe, a_socket, a_link, an_endless_link, a_link_to_a_folder]
Kind = Callable[[Path, Path], None]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "trace")
    return tmp_path / "trace"


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_plain_files_is_opened(tmp_path: Path, secret: Path, kind: Kind) -> None:
    path = tmp_path / "strange"
    kind(path, secret)
    with pytest.raises(OSError, match="not a plain file"):
        open_plain(path)
    with pytest.raises(OSError, match="not a plain file"):
        copy_plain(path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_part_that_is_a_link_is_not_passed(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "part-0").symlink_to(secret.parent)
    with pytest.raises(NotADirectoryError):
        open_plain(tmp_path / "part-0" / secret.name)
    (tmp_path / "chosen").symlink_to(secret.parent)
    with open_plain(tmp_path / "chosen" / secret.name) as file:
        assert file.read() == SECRET


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["merge", "collect"])
def test_copies_leave_out_and_name_all_but_plain_files(
    tmp_path: Path, trace: Path, secret: Path, kind: Kind, command: str
) -> None:
    rank = sorted(trace.glob("rank-*.arrow"))[0]
    rank.unlink()
    counters = trace / rank.name.replace("rank", "counters")
    for path in (rank, counters):
        kind(path, secret)
    done = run_command(command, trace, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert rank.name in done.output
    assert counters.name in done.output
    assert SECRET not in contents(tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert read_run(tmp_path / "out").status == "partial"


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_refuses_or_names_them(trace: Path, secret: Path, kind: Kind) -> None:
    rank = sorted(trace.glob("rank-*.arrow"))[0]
    rank.unlink()
    kind(rank, secret)
    for command in (["analyze", trace], ["query", trace, "SELECT count(*) FROM events"]):
        done = run_command(*command)
        assert rank.name in done.output, done.output
        assert not isinstance(done.exception, (ValueError, OSError))
    run = trace / "run.json"
    run.unlink()
    kind(run, secret)
    done = run_command("analyze", trace)
    assert done.exit_code != 0
    assert "None" not in str(done.exception)


def test_a_part_that_is_a_link_is_named_and_left_out(tmp_path: Path, trace: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_run(whole, RunInfo(labels={PARTS_LABEL: True}))
    (whole / "part-00000").symlink_to(trace)
    run = read_run(whole)
    assert not run.ranks
    assert any("part-00000" in note and "link" in note for note in run.notes)
    shutil.copytree(trace, whole / "part-00001")
    assert read_run(whole).ranks
    # The user may name a link.
    (tmp_path / "part-mine").symlink_to(trace)
    assert open_trace(tmp_path / "part-mine").ranks == open_trace(trace).ranks
    (tmp_path / "other").symlink_to(trace)
    assert open_trace(tmp_path / "other").analyze().summary == open_trace(trace).analyze().summary


def test_directories_presented_as_one_are_copied_with_their_members(trace: Path) -> None:
    """Tasks of an engine get copies by pickle."""
    copied = pickle.loads(pickle.dumps(joined_directory(trace.parent / "none", [trace])))
    assert list(parts_of(copied)) == [trace]


def test_a_pipe_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for command in ("collect", "merge"):
        done = run_command(command, tmp_path / "pipe", "-o", tmp_path / "out")
        assert done.exit_code != 0
        assert "None" not in done.output + str(done.exception)


@pytest.mark.parametrize("kind", KINDS)
def test_imports_read_only_plain_files_of_a_folder(tmp_path: Path, kind: Kind) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}
    document = {"schemaVersion": 1, "traceEvents": [event]}
    outside = tmp_path / "outside" / "secret.json"
    outside.parent.mkdir()
    hidden = {**document, "traceEvents": [{**event, "name": "secret"}]}
    outside.write_text(json.dumps(hidden))
    folder = tmp_path / "folder"
    folder.mkdir()
    kind(folder / "rank1.json", outside)
    with pytest.raises(TraceError, match=r"rank1\.json"):
        open_trace(folder)
    (folder / "rank0.json").write_text(json.dumps(document))
    trace = formats.read(folder)
    assert len(trace.tables) == 1
    assert any("rank1.json" in note for note in trace.run.notes)
    assert trace.run.status == "partial"
    # The user may name a link.
    (tmp_path / "mine.json").symlink_to(outside)
    assert formats.read(tmp_path / "mine.json").tables


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_copies_keep_the_permissions(tmp_path: Path, trace: Path, mode: int) -> None:
    former = os.umask(0o022)
    try:
        for path in trace.iterdir():
            path.chmod(mode)
        trace.chmod(0o700 if mode == 0o600 else 0o755)
        for command in ("merge", "collect"):
            out = tmp_path / command
            assert run_command(command, trace, "-o", out).exit_code == 0
            found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
            assert set(found.values()) == {mode}, found
            assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(trace.stat().st_mode)
    finally:
        os.umask(former)


@pytest.mark.parametrize("name", ["../../etc", "/etc", "link"])
def test_results_name_no_trace_outside_the_experiment(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "experiment"
    shutil.copytree(ROOT / "sample_traces" / "experiment-400mbit", folder)
    (folder / "link").symlink_to("/etc")
    file = folder / "results.json"
    assert results_file.read(file).rows
    value = json.loads(file.read_text())
    value["rows"][0]["trace"] = name
    file.write_text(json.dumps(value))
    with pytest.raises(TraceError, match="outside"):
        results_file.read(file)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(TraceError):
        results_file.load(folder)
