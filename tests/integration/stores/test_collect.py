"""Directories of several nodes become one trace, and what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.long_trace import write_long_trace
from support.s3_server import BUCKET, S3Server

import ddltrace
from ddltrace.cli import cli
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.trace.run_files import read_run_file, write_run
from ddltrace.tracer.trace.run_info import JOB_LABEL
from ddltrace.tracer.trace.run_reader import read_run

from .conftest import put


def collect(*arguments: object) -> Result:
    command = ["collect", *map(str, arguments)]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


def node(folder: Path, rank: int, **options: int) -> Path:
    """The directory of a node with one rank."""
    write_long_trace(folder / f"node-{rank}", 20, ranks=[rank], **options)
    return folder / f"node-{rank}"


def name_job(directory: Path, job: str) -> None:
    run = read_run_file(directory)
    run.labels[JOB_LABEL] = job
    write_run(directory, run)


def test_a_path_and_a_url_are_collected(environment: S3Server, tmp_path: Path) -> None:
    here, there = node(tmp_path, 0), node(tmp_path, 1)
    put(environment, there, "node-1")
    done = collect(here, f"s3://{BUCKET}/node-1", "-o", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    whole = ddltrace.open(tmp_path / "whole")
    assert (whole.ranks, whole.run.status, whole.notes) == ([0, 1], "complete", [])
    assert whole.analyze().joining.complete == 20
    assert whole.events(1).equals(ddltrace.open(there).events(1))


def test_rings_of_nccl_come_along_from_a_store(environment: S3Server, tmp_path: Path) -> None:
    there = node(tmp_path, 1)
    (there / "nccl-1-77.ring").write_bytes(b"a ring's records")
    put(environment, there, "node-1")
    done = collect(f"s3://{BUCKET}/node-1", "-o", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "whole" / "nccl-1-77.ring").read_bytes() == b"a ring's records"


def test_what_is_missing_is_named(environment: S3Server, tmp_path: Path) -> None:
    here, other = node(tmp_path, 0, world_size=4), node(tmp_path, 2, world_size=4)
    next(other.glob("*.arrow")).unlink()
    sources = here, other, tmp_path / "gone", f"s3://{BUCKET}/nowhere"
    done = CliRunner().invoke(cli, ["collect", *map(str, sources), "-o", str(tmp_path / "whole")])
    assert isinstance(done.exception, TraceError)
    assert "2 of 4 directories could not be read" in str(done.exception)
    assert f"{tmp_path / 'gone'} is left out" in done.stderr
    assert f"s3://{BUCKET}/nowhere is left out" in done.stderr
    notes = read_run(tmp_path / "whole").notes
    assert any("no trace of rank 1, 3 of 4" in note for note in notes)
    assert any("rank 2: what process None recorded is gone" in note for note in notes)
    assert f"s3://{BUCKET}/nowhere could not be collected" in notes
    with pytest.raises(TraceError, match="none of the directories"):
        collect(tmp_path / "gone", "-o", tmp_path / "nothing")


def test_traces_of_different_jobs_are_refused(environment: S3Server, tmp_path: Path) -> None:
    first, second = node(tmp_path, 0), node(tmp_path, 1)
    larger = node(tmp_path, 3, world_size=4)
    for directory, job in ((first, "17"), (second, "18")):
        name_job(directory, job)
    for sources, said in (
        ((first, second), "of the job 17, .* of the job 18"),
        ((first, larger), "job of 2 ranks"),
        ((first, first), "both hold rank 0"),
    ):
        with pytest.raises(UsageError, match=said):
            collect(*sources, "-o", tmp_path / "whole")
        assert not (tmp_path / "whole").exists()
    # A copy of what is in a store has its URL in the message.
    put(environment, first, "same")
    with pytest.raises(UsageError, match=f"{first} and s3://{BUCKET}/same both hold rank 0"):
        collect(first, f"s3://{BUCKET}/same", "-o", tmp_path / "whole")
    name_job(second, "17")
    assert collect(first, second, "-o", tmp_path / "whole").exit_code == 0
