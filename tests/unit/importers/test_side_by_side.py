"""Files are read by several processes as they are by one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.readers import words

from ddltrace.analyzer.importers.kineto import decode, kineto_reader, parallel_decode
from ddltrace.analyzer.importers.kineto.parallel_decode import read_side_by_side
from ddltrace.tracer.errors import TraceError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where helpers put what they read: empty again after every test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("READERS_OF", str(os.getpid()))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def as_read(_: Path, result: Any) -> Any:
    return result


def write(tmp_path: Path, *texts: str) -> list[Path]:
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_results_stand_in_the_order_of_the_files(tmp_path: Path, folder: Path) -> None:
    texts = [f"file {number} print " + "x " * number for number in range(40)]
    texts[-1] += "after-helper"
    found = read_side_by_side(write(tmp_path, *texts), words, as_read, 0)
    assert [table["word"].to_pylist() for _, table in found] == [text.split() for text in texts]
    assert len({pid for pid, _ in found}) == 2
    assert list(folder.iterdir()) == []


def test_small_files_are_read_here(tmp_path: Path) -> None:
    found = read_side_by_side(write(tmp_path, "a", "b", "c"), words, as_read, 1 << 20)
    assert {pid for pid, _ in found} == {os.getpid()}


def test_helper_reads_one_file_after_the_other(tmp_path: Path, folder: Path) -> None:
    [path] = write(tmp_path, "one word")
    helper = parallel_decode._Helper(folder, words)
    helper.wait_until_ready()
    try:
        pid, table = helper.read(path)
        again, same = helper.read(path)
    finally:
        helper.kill()
    assert pid == again != os.getpid()
    assert same.equals(table)
    assert table["word"].to_pylist() == ["one", "word"]
    assert list(folder.iterdir()) == []


def test_first_file_that_is_refused_is_named(tmp_path: Path, folder: Path) -> None:
    paths = write(tmp_path, "good", "refuse", "good", "refuse", "refuse after-helper")
    with pytest.raises(TraceError, match=r"^1\.txt is refused$"):
        read_side_by_side(paths, words, as_read, 0)
    assert list(folder.iterdir()) == []


def test_helper_passes_an_error_on(tmp_path: Path) -> None:
    helper = parallel_decode._Helper(tmp_path, words)
    helper.wait_until_ready()
    try:
        with pytest.raises(TraceError, match=r"^0\.txt is refused$"):
            helper.read(write(tmp_path, "refuse")[0])
    finally:
        helper.kill()


def test_file_whose_helper_dies_is_read_here(tmp_path: Path) -> None:
    paths = write(tmp_path, *["die-in-helper"] * 5, "after-helper")
    found = read_side_by_side(paths, words, as_read, 0)
    assert [pid for pid, _ in found] == [os.getpid()] * 6


def test_without_helpers_all_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    found = read_side_by_side(write(tmp_path, "a", "b"), words, as_read, 0)
    assert {pid for pid, _ in found} == {os.getpid()}


@pytest.mark.parametrize("read", [kineto_reader.read_file, decode.decode_file])
def test_kineto_file_is_the_same_either_way(foreign: Path, folder: Path, read: Any) -> None:
    path = foreign / "kineto-cpu" / "rank-0.json.gz"
    ours = kineto_reader.read_file(path)
    helper = parallel_decode._Helper(folder, read)
    helper.wait_until_ready()
    try:
        theirs = helper.read(path)
    finally:
        helper.kill()
    if read is decode.decode_file:
        theirs = kineto_reader.map_file(path, theirs)
    assert theirs.table.equals(ours.table)
    assert {**vars(theirs), "table": None} == {**vars(ours), "table": None}


def test_script_without_a_main_guard_is_run_once(foreign: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from pathlib import Path
            from ddltrace.analyzer.importers.kineto import kineto_reader
            from ddltrace.analyzer.importers.kineto.parallel_decode import read_side_by_side
            os.sched_getaffinity = lambda _: {{0, 1}}
            paths = sorted(Path({str(foreign / "kineto-cpu")!r}).iterdir())
            read = kineto_reader.read_file
            print(len(read_side_by_side(paths * 4, read, lambda _, file: file, 0)))
            """
        ),
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120
    )
    files = len(list((foreign / "kineto-cpu").iterdir()))
    assert done.stdout == f"{4 * files}\n"
    assert done.stderr == ""


def test_decoding_needs_no_heavy_library() -> None:
    """A helper would take longer to import one than to decode what it is started for."""
    program = """
import sys
from ddltrace.analyzer.importers.kineto import decode_worker
from ddltrace.analyzer.importers.kineto import decode
print(sorted({"numpy", "pyarrow", "pandas"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"
