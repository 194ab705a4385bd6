"""Traces in stores give the same numbers as local ones, and only what is needed is read."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import fs
from support.s3_server import BUCKET, S3Server
from support.sampling import choose_seed

import ddltrace
from ddltrace.analyzer.engine.dask_engine import open_dask
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.trace.step_selection import divide
from ddltrace.cli import cli
from ddltrace.dashboard.discovery import discover
from ddltrace.dashboard.stored import stored_trace
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.errors import (
    DdltraceError,
    EngineError,
    MissingCapabilityError,
    StoreError,
    TraceError,
    UsageError,
)
from ddltrace.tracer.storage.location import location_of
from ddltrace.tracer.storage.remote_path import RemotePath
from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.run_reader import read_run

from .conftest import SAMPLE, put


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def document(location: str, *options: str) -> dict[str, Any]:
    """The JSON of an analysis, without the trace's place."""
    done = run("analyze", location, "--json", *options)
    assert not done.exit_code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    del found["trace"]["name"]
    for finding in found["findings"]:
        del finding["command"]
    return found


def test_the_analysis_is_that_of_the_local_trace(sample: str) -> None:
    assert document(sample) == document(str(SAMPLE))
    assert document(sample, "--steps", "10:14") == document(str(SAMPLE), "--steps", "10:14")


def test_one_step_of_a_long_trace_takes_few_bytes(environment: S3Server, long_trace: Path) -> None:
    size = sum(path.stat().st_size for path in long_trace.glob("*.arrow"))
    local = document(str(long_trace), "--steps", "9000:9001")
    environment.forget()
    assert document(f"s3://{BUCKET}/long", "--steps", "9000:9001") == local
    # Each rank has five batches; the step is in one of them.
    assert 0 < environment.sent < size / 4
    environment.forget()
    assert run("analyze", f"s3://{BUCKET}/long", "--steps", "20000:20001").exit_code == 1
    assert environment.sent < size / 20


@pytest.mark.long
def test_ranges_of_a_long_trace_leave_out_other_batches(
    environment: S3Server, long_trace: Path
) -> None:
    size = sum(path.stat().st_size for path in long_trace.glob("*.arrow"))
    local, remote = open_trace(long_trace), open_trace(f"s3://{BUCKET}/long")
    for trace in (local, remote):
        trace.memory_limit = 1
        assert trace.step_selection is not None
        trace.memory_limit = int(trace.step_selection.sizes.sum()) - 1
        del trace.step_selection
    expected = local.analyze()
    environment.forget()
    found = remote.analyze()
    assert replace(found, findings=()) == replace(
        expected, findings=(), trace=replace(expected.trace, name=found.trace.name)
    )
    assert remote.step_selection is not None
    ranges = divide(remote.step_selection)
    print(f"{environment.sent / size:.2f} times the files, in {len(ranges)} ranges")
    # Each of five batches of a rank for the range that has it, and for one at its border.
    assert len(ranges) > 4
    assert environment.sent < 3 * size


def test_one_column_of_a_long_trace_takes_few_bytes(
    environment: S3Server, long_trace: Path
) -> None:
    trace = ddltrace.open(f"s3://{BUCKET}/long")
    local = ddltrace.open(long_trace)
    info = trace.infos(1)[0]
    size = (long_trace / f"{info.segment}.arrow").stat().st_size
    environment.forget()
    for name in ("step", "op"):
        found = pa.Table.from_batches(trace.read_columns(info, [name]))
        assert found.equals(pa.Table.from_batches(local.read_columns(info, [name])))
    assert environment.sent < size / 20
    sampled = list(EventReader(trace.path, info.segment, most=2))
    expected = list(EventReader(long_trace, info.segment, most=2))
    assert sampled == expected
    assert len(sampled) == 2


@pytest.mark.parametrize(("gap", "requests"), [(8 << 10, 1), ((8 << 10) + 1, 2)])
def test_parts_that_are_close_are_read_at_once(
    environment: S3Server, sample: str, gap: int, requests: int
) -> None:
    file = max(SAMPLE.glob("*.arrow"), key=lambda path: path.stat().st_size)
    content, path = file.read_bytes(), RemotePath(f"{sample}/{file.name}")
    environment.forget()
    ranges = [(20 + gap, 30 + gap), (5, 20), (0, 10), (5, 20), (7, 7)]
    assert path.read_ranges(ranges) == [content[begin:end] for begin, end in ranges]
    assert path.read_ranges([]) == []
    assert len([each for each in environment.methods("GET") if file.name in each]) == requests


def test_copies_of_a_path_list_a_directory_once(environment: S3Server, sample: str) -> None:
    """The tasks of an engine have a copy each, and a directory may have thousands of files."""
    environment.forget()
    content = pickle.dumps(location_of(sample))
    for _ in range(3):
        directory = pickle.loads(content)
        assert (directory / "run.json").is_file()
    assert len(environment.methods("GET", f"/{BUCKET}")) == 1
    assert location_of(sample).is_dir()  # another path, which sees changes
    assert (location_of(sample) / "run.json").is_file()
    assert len(environment.methods("GET", f"/{BUCKET}")) > 1


def test_commands_take_urls(sample: str, tmp_path: Path) -> None:
    compared = run("compare", sample, str(SAMPLE), "--json")
    assert json.loads(compared.stdout)["step_us"]["change"] == 0
    sql = "SELECT rank, count(*) AS n FROM messages GROUP BY rank ORDER BY rank"
    rows = [run("query", place, "--format", "csv", sql).stdout for place in (sample, str(SAMPLE))]
    assert rows[0] == rows[1] != ""
    files = [tmp_path / "remote.csv", tmp_path / "local.csv"]
    for place, file in zip((sample, str(SAMPLE)), files, strict=True):
        assert not run("export", place, "--to", "csv", "-o", str(file)).exit_code
    assert files[0].read_bytes() == files[1].read_bytes()
    found = discover([sample])
    workspace = Workspace([open_trace(path) for path in found.traces])
    assert workspace.get(0).layout()["ranks"] == [0, 1, 2, 3]
    with pytest.raises(TraceError, match="followed live"):
        workspace.live(0)


def test_an_importable_file_is_read_from_a_store(environment: S3Server, tmp_path: Path) -> None:
    chrome = tmp_path / "rank0.json"
    assert not run("export", str(SAMPLE), "--to", "chrome", "-o", str(chrome)).exit_code
    put(environment, chrome, "chrome/rank0.json")
    local, remote = (ddltrace.open(place) for place in (chrome, f"s3://{BUCKET}/chrome/rank0.json"))
    assert remote.events(0).equals(local.events(0))
    kept = tmp_path / "kept"
    done = run("import", f"s3://{BUCKET}/chrome", "-o", str(kept))
    assert not done.exit_code, done.output
    assert ddltrace.open(kept).events(0).num_rows == local.events(0).num_rows


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://no-such-bucket-here/run", "does not exist"),
        (f"s3://{BUCKET}/nothing", "does not exist"),
        ("weird://bucket/run", "not a protocol that is known here"),
        ("s3://", "names no bucket"),
    ],
)
def test_errors_are_one_clear_line(environment: S3Server, url: str, said: str) -> None:
    done = run("analyze", url)
    text = done.stderr or str(done.exception)  # an error of ours is printed by `main`
    assert done.exit_code
    assert said in text
    assert isinstance(done.exception, DdltraceError | SystemExit)


def test_a_store_that_denies_or_is_away_is_reported(environment: S3Server) -> None:
    environment.denies = True
    try:
        with pytest.raises(StoreError, match="access denied: give credentials") as denied:
            ddltrace.open(f"s3://{BUCKET}/denied")
    finally:
        environment.denies = False
    with environment.away(), pytest.raises(StoreError, match="cannot be reached") as away:
        ddltrace.open(f"s3://{BUCKET}/away")
    for caught in (denied, away):
        assert len(str(caught.value).splitlines()) == 1
        assert "secret-of-the-test" not in str(caught.value)


def test_a_store_that_goes_away_ends_an_analysis(
    sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not go on with a part of the trace, wherever it is: the numbers would be others."""
    real = RemotePath.read_ranges
    left = calls = 0

    def read_ranges(self: RemotePath, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal left, calls
        calls, left = calls + 1, left - 1
        if not left:
            raise StoreError(f"{self}: the store cannot be reached")
        return real(self, ranges)

    monkeypatch.setattr(RemotePath, "read_ranges", read_ranges)
    for options in ((), ("--steps", "10:14")):
        calls = 0
        document(sample, *options)
        draw = random.Random(choose_seed())
        for number in {2, calls, *draw.sample(range(1, calls + 1), 4)}:
            left = number
            done = run("analyze", sample, "--json", *options)
            assert isinstance(done.exception, StoreError), f"read {number} of {calls}"
            assert not done.stdout


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "s3://bucket/run?secret_key=hunter2",
        "gs://bucket/run?access_token=hunter2",
        "https://user:hunter2@example.org/run",
        "hdfs://user%3Ahunter2@host/run",
        # Characters of a secret that end a part of a URL.
        "s3://user:hunter2/and+more@bucket/run",
        "s3://user:hunter2@and/more@bucket/run",
        "s3://user:and?hunter2@bucket/run",
        "s3://user:and#hunter2@bucket/run",
        "s3://bucket/run?endpoint_override=http://user:hunter2@host:9000",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="credentials") as caught:
        location_of(url)
    assert "hunter2" not in str(caught.value)
    for command in (["analyze", url], ["compare", url, url], ["query", url, "SELECT 1"]):
        done = run(*command)
        assert done.exit_code
        assert "hunter2" not in done.output + str(done.exception)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingCapabilityError, match=r"pip install 'ddltrace\[fsspec\]'"):
        ddltrace.open("ftps://bucket/run")


def test_fsspec_and_file_urls(tmp_path: Path) -> None:
    memory = fs.PyFileSystem(fs.FSSpecHandler(pytest.importorskip("fsspec").filesystem("memory")))
    fs.copy_files(str(SAMPLE), "traces/one", destination_filesystem=memory)
    assert document("memory://traces/one") == document(str(SAMPLE)) == document(f"file://{SAMPLE}")


def test_damaged_files_in_a_store_are_noticed(tmp_path: Path) -> None:
    """Whatever bytes are damaged: no crash, and a note unless the rows are those that were."""
    filesystem = pytest.importorskip("fsspec").filesystem("memory")
    whole = {path.name: path.read_bytes() for path in SAMPLE.iterdir()}
    name = next(name for name in sorted(whole) if name.startswith("rank-00000"))
    expected = ddltrace.open(SAMPLE).events(0)
    draw = random.Random(choose_seed())
    for number in range(40):
        content = bytearray(whole[name])
        if number % 4 == 0:
            del content[draw.randrange(len(content)) :]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        for file, original in whole.items():
            filesystem.pipe_file(f"/damaged{number}/{file}", original)
        filesystem.pipe_file(f"/damaged{number}/{name}", bytes(content))
        trace = ddltrace.open(f"memory://damaged{number}")
        if trace.events(0).equals(expected):
            continue
        assert trace.damage, f"{number}: other rows, and no note"
        # Some columns are read by way of the footer, which may be the damaged part.
        for batch in trace.read_columns(trace.infos(0)[0], ["step", "seq"]):
            batch.validate(full=True)


def test_a_stream_in_a_store_is_read_as_far_as_it_is_intact(tmp_path: Path) -> None:
    """A rank that was killed leaves a stream, whose last batch may be cut."""
    filesystem = pytest.importorskip("fsspec").filesystem("memory")
    directory = tmp_path / "streams"
    shutil.copytree(SAMPLE, directory)
    info = read_run(directory).ranks[0]
    batches = list(EventReader(directory, info.segment))
    stream = directory / f"{info.segment}.arrows"
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in [part for whole in batches for part in (whole.slice(0, 9), whole.slice(9))]:
            writer.write_batch(batch)
    (directory / f"{info.segment}.arrow").unlink()
    stream.write_bytes(stream.read_bytes()[:-20])
    for path in directory.iterdir():
        filesystem.pipe_file(f"/streams/{path.name}", path.read_bytes())
    local, remote = ddltrace.open(directory), ddltrace.open("memory://streams")
    assert remote.events(0).equals(local.events(0))
    assert remote.notes == local.notes
    assert remote.damage
    assert 0 < remote.events(0).num_rows < 10


def test_workers_of_a_dask_cluster_read_from_the_store(sample: str) -> None:
    pytest.importorskip("distributed")
    memory = fs.PyFileSystem(fs.FSSpecHandler(pytest.importorskip("fsspec").filesystem("memory")))
    fs.copy_files(str(SAMPLE), "traces/own", destination_filesystem=memory)
    with open_dask(workers=1) as engine:
        trace = open_trace(sample, engine)
        assert trace.analyze().to_json() == open_trace(sample).analyze().to_json()
        with pytest.raises(EngineError, match=r"start the workers with the store's endpoint"):
            open_trace("memory://traces/own", engine)  # of this process


def test_the_timeline_of_a_trace_in_a_store_is_kept_by_the_user(
    sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Child processes build it, which open the same URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stored_trace, "FEWEST_EVENTS", 1000)
    opened = Workspace([ddltrace.open(sample)]).get(0)
    assert opened.timeline.num_events == 6628
    assert list(tmp_path.glob("ddltrace/traces/*/*.arrow"))
