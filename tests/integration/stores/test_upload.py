"""Uploads send each file once, byte by byte, and the record of the run last."""

from __future__ import annotations

import itertools
import shutil
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyarrow import fs
from support.s3_server import BUCKET, S3Server

import ddltrace
from ddltrace.cli import cli
from ddltrace.tracer.errors import StoreError, UsageError
from ddltrace.tracer.launch import upload as upload_module
from ddltrace.tracer.launch.upload import (
    MANIFEST_FILE,
    BackgroundUpload,
    Progress,
    Upload,
    read_record,
)
from ddltrace.tracer.storage import store_threads
from ddltrace.tracer.storage.stores import parse_url

from .conftest import SAMPLE, put

OTHER_SAMPLE = SAMPLE.parent / "straggler"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a sample trace."""
    target = tmp_path / "run"
    shutil.copytree(SAMPLE, target)
    return target


def contents(server: S3Server, name: str) -> dict[str, bytes]:
    """The objects below a name, without the manifest."""
    store = server.filesystem()
    base = f"{BUCKET}/{name}"
    infos = store.get_file_info(fs.FileSelector(base, recursive=True))
    found = {}
    for info in infos:
        if info.is_file and info.base_name != MANIFEST_FILE:
            with store.open_input_file(info.path) as file:
                found[info.path.removeprefix(f"{base}/")] = file.read()
    return found


def local(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("name", ["equal", "a run #1 of 100%25 + b"])
def test_files_are_equal_and_the_run_comes_last(
    environment: S3Server, directory: Path, name: str
) -> None:
    environment.forget()
    done = Upload(directory, parse_url(f"s3://{BUCKET}/{name}")).send_all()
    assert done == Progress(5, 0, sum(map(len, local(directory).values())))
    assert contents(environment, name) == local(directory)
    stored = [path.rpartition("/")[2] for path in environment.methods("PUT") if f"/{name}/" in path]
    assert list(dict.fromkeys(stored))[-2:] == [MANIFEST_FILE, "run.json"]
    assert ddltrace.open(f"s3://{BUCKET}/{name}").ranks == ddltrace.open(directory).ranks


def test_an_upload_is_resumed_where_the_store_went_away(
    environment: S3Server, directory: Path
) -> None:
    url = f"s3://{BUCKET}/resumed"
    heard: list[str] = []

    def stop_at_third(name: str) -> None:
        heard.append(name)
        if len(heard) == 3:
            environment.stop()

    try:
        with pytest.raises(StoreError, match="cannot be reached"):
            Upload(directory, parse_url(url)).send_all(stop_at_third)
    finally:
        environment.start()
    assert len(contents(environment, "resumed")) == 2
    assert "run.json" not in contents(environment, "resumed")
    done = CliRunner().invoke(cli, ["upload", str(directory)])
    assert done.exit_code == 0, done.output
    assert "3 files" in done.stderr
    assert "2 files were there" in done.stderr
    assert contents(environment, "resumed") == local(directory)
    environment.forget()
    # Without the record of the directory, that of the store says what is there.
    (directory / ".ddltrace-upload.json").unlink()
    with pytest.raises(UsageError, match="name one: ddltrace upload"):
        CliRunner().invoke(cli, ["upload", str(directory)], catch_exceptions=False)
    assert Upload(directory, parse_url(url)).send_all() == Progress(0, 5, 0)
    assert not environment.methods("PUT")


def test_large_files_are_sent_at_the_same_time(
    environment: S3Server, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "_LARGE_BYTES", 1)
    two_at_once = threading.Barrier(2)
    url = parse_url(f"s3://{BUCKET}/large")
    numbers = itertools.count(1)

    def stop_at_third(name: str) -> None:
        if next(numbers) < 3:
            two_at_once.wait(60)
        else:
            raise StoreError("the store cannot be reached")

    with pytest.raises(StoreError, match="cannot be reached"):
        Upload(directory, url).send_all(stop_at_third)
    assert "run.json" not in contents(environment, "large")
    done = Upload(directory, url).send_all()
    assert (done.sent, done.skipped) == (3, 2)
    assert contents(environment, "large") == local(directory)


def test_changed_and_damaged_files_are_sent_again(environment: S3Server, directory: Path) -> None:
    url = parse_url(f"s3://{BUCKET}/changed")
    Upload(directory, url).send_all()
    first, second = sorted(directory.glob("rank-*"))[:2]
    first.write_bytes(first.read_bytes()[::-1])  # of the same size
    with environment.filesystem().open_output_stream(f"{BUCKET}/changed/{second.name}") as file:
        file.write(b"cut")
    assert Upload(directory, url).send_all().sent == 2
    assert contents(environment, "changed") == local(directory)
    first.unlink()
    assert Upload(directory, url).send_all().sent == 0
    assert contents(environment, "changed") == local(directory)


def test_growing_files_are_sent_before_the_end(environment: S3Server, directory: Path) -> None:
    upload = Upload(directory, parse_url(f"s3://{BUCKET}/growing"))
    stream = directory / "rank-00009-0-1.arrows"
    stream.write_bytes(b"x" * (2 << 20))
    upload.send_grown()
    assert contents(environment, "growing") == local(directory)
    environment.forget()
    stream.write_bytes(b"x" * (3 << 20))
    upload.send_grown()
    assert not environment.methods("PUT")
    stream.write_bytes(b"x" * (4 << 20))
    upload.send_grown()
    assert len(contents(environment, "growing")[stream.name]) == 4 << 20
    # At the end, the stream has become another file.
    stream.rename(stream.with_suffix(".arrow"))
    upload.send_all()
    assert contents(environment, "growing") == local(directory)


def test_launchers_of_one_job_upload_their_parts(environment: S3Server, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    url = parse_url(f"s3://{BUCKET}/parts")
    for number in range(2):
        shutil.copytree(SAMPLE, whole / f"part-{number}")
    (whole / "run.json").write_text("{}")
    for number in range(2):
        assert BackgroundUpload(whole, whole / f"part-{number}", url).finish() is None
        found = contents(environment, "parts")
        assert {name.partition("/")[0] for name in found} == {
            "run.json",
            *(f"part-{n}" for n in range(number + 1)),
        }
    assert Upload(whole, url).send_all().sent == 0


def test_a_trace_in_the_store_is_replaced_only_by_force(
    environment: S3Server, directory: Path
) -> None:
    url = parse_url(f"s3://{BUCKET}/forced")
    warnings: list[str] = []

    def begin(*, force: bool) -> BackgroundUpload:
        upload = BackgroundUpload(directory, directory, url)
        upload.check(warnings.append, force=force)
        return upload

    assert begin(force=False).finish() is None
    with pytest.raises(UsageError, match="--force"):
        begin(force=False)
    assert contents(environment, "forced")
    begin(force=True)
    assert not contents(environment, "forced")
    assert not warnings
    with environment.away():
        begin(force=False)
    assert "cannot be reached" in warnings[0]


def test_a_store_that_does_not_answer_does_not_stop_the_job(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "_CHECK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"s3://{BUCKET}/run?scheme=http&endpoint_override=127.0.0.1:{port}"
        warnings: list[str] = []
        upload = BackgroundUpload(directory, directory, parse_url(url))
        upload.check(warnings.append, force=False)
    assert "the store does not answer: the trace is written here" in warnings[0]


def test_the_end_does_not_wait_for_a_store_that_hangs(
    environment: S3Server, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(upload_module.WAIT_VARIABLE, "0")
    monkeypatch.setattr(upload_module, "_ANSWER_S", 0.2)
    url = f"s3://{BUCKET}/hanging"
    upload = BackgroundUpload(directory, directory, parse_url(url))
    with environment.hanging():
        missing = upload.finish()
        assert missing == f"5 of 5 files are not in the store ({url}: the store does not answer)"
        assert store_threads.is_any_left()


def test_a_store_that_goes_away_at_the_end_is_waited_for(
    environment: S3Server, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.stop()
    monkeypatch.setattr(upload_module.time, "sleep", lambda _: environment.start())
    upload = BackgroundUpload(directory, directory, parse_url(f"s3://{BUCKET}/back"))
    assert upload.finish() is None
    assert contents(environment, "back") == local(directory)


def test_two_runs_with_one_url_are_not_mixed(
    environment: S3Server, directory: Path, tmp_path: Path
) -> None:
    """Both began before the other had uploaded anything."""
    url = parse_url(f"s3://{BUCKET}/twice")
    shutil.copytree(OTHER_SAMPLE, tmp_path / "other")
    one, other = (Upload(path, url) for path in (directory, tmp_path / "other"))
    other.send_grown()
    one.send_grown()
    with pytest.raises(UsageError, match="has the files of another run"):
        other.send_all()
    assert contents(environment, "twice") == local(directory)
    one.send_all()
    with pytest.raises(UsageError, match="choose another URL"):
        CliRunner().invoke(
            cli, ["upload", str(tmp_path / "other"), str(url)], catch_exceptions=False
        )
    assert contents(environment, "twice") == local(directory)
    # With --force, although the store was away at the beginning.
    forced = BackgroundUpload(tmp_path / "other", tmp_path / "other", url)
    with environment.away():
        forced.check(lambda text: None, force=True)
    assert forced.finish() is None
    assert contents(environment, "twice") == local(tmp_path / "other")


def test_force_replaces_a_part_and_no_other(environment: S3Server, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    for number, sample in enumerate((SAMPLE, OTHER_SAMPLE)):
        put(environment, sample, f"forced-parts/part-{number}")
    shutil.copytree(OTHER_SAMPLE, whole / "part-0")
    url = parse_url(f"s3://{BUCKET}/forced-parts")
    upload = BackgroundUpload(whole, whole / "part-0", url)
    upload.check(lambda text: None, force=True)
    assert upload.finish() is None
    expected = local(OTHER_SAMPLE)
    assert contents(environment, "forced-parts") == {
        f"part-{number}/{name}": content
        for number in range(2)
        for name, content in expected.items()
    }
    with pytest.raises(UsageError, match="a whole bucket, which is not emptied"):
        Upload(whole, parse_url(f"s3://{BUCKET}")).clear()


def test_what_a_killed_launcher_sent_of_running_processes_is_removed(
    environment: S3Server, directory: Path
) -> None:
    final = next(directory.glob("rank-*.arrow"))
    # The launcher was killed before it recorded what it had sent; the last is another's.
    own = (f"{final.stem}.arrows", f"{final.stem}.json")
    for name in (*own, "rank-00077-0-1.arrows"):
        with environment.filesystem().open_output_stream(f"{BUCKET}/streams/{name}") as file:
            file.write(b"early")
    Upload(directory, parse_url(f"s3://{BUCKET}/streams")).send_all()
    assert contents(environment, "streams") == {
        **local(directory),
        "rank-00077-0-1.arrows": b"early",
    }


@pytest.mark.parametrize("is_part", [False, True])
def test_a_directory_that_is_gone_takes_nothing_from_the_store(
    environment: S3Server, directory: Path, is_part: bool
) -> None:
    own = directory / "part-0" if is_part else directory
    if is_part:
        shutil.copytree(SAMPLE, own)
    url = parse_url(f"s3://{BUCKET}/gone-{is_part}")
    upload = BackgroundUpload(directory, own, url)
    assert upload.finish() is None
    expected = contents(environment, f"gone-{is_part}")
    shutil.rmtree(own)
    missing = upload.finish()
    assert missing is not None
    assert f"{own} is gone: the store keeps what was uploaded before" in missing
    assert contents(environment, f"gone-{is_part}") == expected


def test_the_record_holds_no_credentials(environment: S3Server, directory: Path) -> None:
    upload = Upload(directory, parse_url(f"s3://{BUCKET}/secret?region=eu-west-1"))
    upload.send_all()
    assert read_record(directory)[0] == f"s3://{BUCKET}/secret?region=eu-west-1"
    written = [path.read_bytes() for path in directory.iterdir()]
    written += contents(environment, "secret").values()
    assert not [text for text in written if b"of-the-test" in text]
