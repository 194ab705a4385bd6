"""Files that ddltrace makes under any umask: its owner can use them, and no one else the cache."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.stored.cache import FOLDER, Cache
from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.launch.launcher import keep_owner_access, prepare_directory, run_untraced
from ddltrace.tracer.native import build
from ddltrace.tracer.trace.json_files import write_json_atomically
from ddltrace.tracer.trace.stream_writer import StreamWriter

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
UMASKS = (0o000, 0o002, 0o022, 0o077, 0o777)


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which a program with another umask has made."""
    folder = tmp_path / "ddltrace"
    folder.mkdir()
    folder.chmod(0o775)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    compiler = folder / "bin" / "c++"
    compiler.parent.mkdir(mode=0o700)
    compiler.parent.chmod(0o700)
    compiler.write_text(f"#!/bin/sh\n{text}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")


COMPILES = 'while [ "$1" != -o ]; do shift; done; echo compiled >> "$2"'


def test_what_is_compiled_is_used(
    umask: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch, COMPILES)
    keep_owner_access()
    assert build.is_wanted()
    library = build.build()
    assert build.find() == library
    assert not build.is_wanted()
    assert (mode(library), mode(cache)) == (0o700, 0o700)
    library.chmod(0o770)
    with pytest.raises(MissingCapabilityError, match="can be written by others"):
        build.find()
    assert build.is_wanted()


def test_a_library_that_another_process_has_just_compiled_is_not_compiled_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch, f"echo >> {tmp_path}/calls; {COMPILES}")
    assert build.build() == build.build()
    assert (tmp_path / "calls").read_text() == "\n"


def test_only_the_user_can_read_what_the_dashboard_stores(
    umask: int, cache: Path, tmp_path: Path
) -> None:
    keep_owner_access()
    trace = open_trace(Path(shutil.copytree(SAMPLE, tmp_path / "trace")))
    with Cache(trace).writing("kind") as writer:
        writer.finish({"x": 1})
    found = Cache(trace).read("kind")
    assert found is not None
    assert found.document == {"x": 1}
    [file] = (tmp_path / "trace" / FOLDER).iterdir()
    assert mode(file) == mode(cache / "cache.key") == 0o600
    assert mode(cache) == 0o700


def test_the_owner_can_read_what_a_rank_writes(umask: int, tmp_path: Path) -> None:
    write_json_atomically(tmp_path / "rank.json", {"x": 1})
    StreamWriter(tmp_path / "rank.arrows").close()
    for name in ("rank.json", "rank.arrows"):
        assert mode(tmp_path / name) == 0o666 & ~umask | 0o600


def test_the_launcher_keeps_its_own_access_and_the_job_its_umask(
    umask: int, tmp_path: Path
) -> None:
    of_job = keep_owner_access()
    prepare_directory(tmp_path / "trace", force=False)
    assert mode(tmp_path / "trace") == 0o777 & ~umask | 0o700
    assert mode(tmp_path / "trace" / "run.json") == 0o666 & ~umask | 0o600
    assert run_untraced(["sh", "-c", f"umask > {tmp_path}/umask || exit 1"], of_job) == 0
    if umask != 0o777:  # only root could read it
        assert int((tmp_path / "umask").read_text(), 8) == umask
