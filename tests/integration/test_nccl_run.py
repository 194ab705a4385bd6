"""`ddltrace run --nccl`: NCCL's events in the trace of a job.

No GPU is needed: a job that communicates with Gloo calls the plugin as NCCL would.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, Done, run, torchrun
from support.s3_server import S3Server

from ddltrace.analyzer.joined.nccl_events import nccl_events
from ddltrace.analyzer.nccl.ring_file import read_ring
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.removal import is_file_of_trace
from ddltrace.tracer.trace.trace_files import RING_PATTERN

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("nccl")
    command = [*DDLTRACE, "run", "-o", "trace", "--level", "comm", "--nccl"]
    command += ["--nccl-events", "coll", "--", *torchrun("plays_nccl.py")]
    done = run(command, cwd=cwd)
    assert done.status == 0, done.stderr
    return cwd / "trace"


def test_events_are_merged_with_the_messages_of_the_job(traced: Path) -> None:
    rows = nccl_events(open_trace(traced)).to_pylist()
    assert [(row["rank"], row["seq"]) for row in rows] == [
        (r, s) for r in (0, 1) for s in range(20)
    ]
    for rank in range(2):
        messages = {
            row["id"]: row for row in open_trace(traced).events(rank).to_pylist() if row["op"]
        }
        its_rows = [row for row in rows if row["rank"] == rank]
        mine = [messages[row["message"]] for row in its_rows]
        # Those that C++ repeats for Gloo have no address: NCCL's go through Python.
        addresses = {row["buffer"] for row in mine} - {None}
        assert addresses == {row["send_buffer"] for row in its_rows}
        assert [row["op"] for row in mine] == ["all_reduce"] * 20
        seq = [row["seq"] for row in mine]
        assert seq == list(range(seq[0], seq[0] + 20))


def test_rings_of_ended_jobs_are_short(traced: Path) -> None:
    rings = sorted(traced.glob(RING_PATTERN))
    assert [read_ring(path).rank for path in rings] == [0, 1]
    assert all(path.stat().st_size < 140_000 for path in rings)
    assert all(read_ring(path).notes == [] for path in rings)
    assert all(is_file_of_trace(path.name) for path in rings)


def test_sql_and_merge_have_the_events(traced: Path, tmp_path: Path) -> None:
    done = run([*DDLTRACE, "merge", str(traced), "-o", "merged"], cwd=tmp_path)
    assert done.status == 0, done.stderr
    sql = "select algo, proto, count(*) n, count(message) m from nccl_events group by all"
    done = run([*DDLTRACE, "query", "merged", sql, "--format", "json"], cwd=tmp_path)
    assert json.loads(done.stdout) == [{"algo": "RING", "proto": "LL", "n": 40, "m": 40}]


def test_a_trace_in_a_store_has_the_events(traced: Path, tmp_path: Path) -> None:
    server = S3Server()
    try:
        server.filesystem().create_dir("bucket-of-rings")
        url = "s3://bucket-of-rings/run"
        done = run([*DDLTRACE, "upload", str(traced), url], cwd=tmp_path, **server.environment)
        assert done.status == 0, done.stderr
        sql = "select rank, count(message) m from nccl_events group by all order by all"
        command = [*DDLTRACE, "query", url, sql, "--format", "json"]
        done = run(command, cwd=tmp_path, **server.environment)
        assert json.loads(done.stdout) == [{"rank": 0, "m": 20}, {"rank": 1, "m": 20}]
    finally:
        server.stop()


def attempt(folder: Path, *options: str, **environment: str) -> Done:
    command = [*DDLTRACE, "run", "-o", "trace", *options, "--", sys.executable, "-c", "print(1)"]
    return run(command, cwd=folder, **environment)


def test_does_not_replace_another_plugin(tmp_path: Path) -> None:
    done = attempt(tmp_path, "--nccl", NCCL_PROFILER_PLUGIN="/opt/other.so")
    assert (done.status, done.stdout) == (2, "")
    assert "unset it" in done.stderr
    assert not (tmp_path / "trace").exists()


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    done = attempt(tmp_path, "--nccl", "--nccl-events", "coll,proxies")
    assert done.status == 2
    assert "'proxies' is no kind of event" in done.stderr


def test_the_job_runs_without_a_compiler(tmp_path: Path) -> None:
    """Nothing that NCCL could load: it is said, and the job goes on."""
    done = attempt(tmp_path, "--nccl", PATH="/nowhere", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.stdout == "1\n"
    assert "NCCL's events are not recorded" in done.stderr


def test_doctor_prints_the_path_and_nothing_else(tmp_path: Path) -> None:
    done = run([*DDLTRACE, "doctor", "--nccl-plugin"], cwd=tmp_path)
    assert done.status == 0
    assert Path(done.stdout.removesuffix("\n")).read_bytes().startswith(b"\x7fELF")
