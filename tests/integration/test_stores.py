"""Jobs whose traces go to a store: one that is away, and a launcher that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from support.jobs import DDLTRACE, JOBS, environment, on_ranks, run
from support.s3_server import S3Server

import ddltrace
from ddltrace.tracer.launch.upload import MANIFEST_FILE

# Servers in one process share their objects: that of other tests has another bucket.
BUCKET = "bucket-of-commands"
RUN = f"s3://{BUCKET}/run"
LIMIT_S = 90


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    server.filesystem().create_dir(BUCKET)
    yield server
    server.stop()


def contents(server: S3Server, name: str) -> dict[str, bytes]:
    """The objects below a name, without the manifest."""
    store, base = server.filesystem(), f"{BUCKET}/{name}"
    found = {}
    for info in store.get_file_info(fs.FileSelector(base, allow_not_found=True)):
        if info.base_name != MANIFEST_FILE:
            with store.open_input_file(info.path) as file:
                found[info.base_name] = file.read()
    return found


def names_and_endings(server: S3Server, name: str) -> set[str]:
    """The names of the objects below a name, and their endings."""
    names = list(contents(server, name))
    return {*names, *(Path(each).suffix for each in names)}


def local(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name[0] != "."}


def test_a_store_that_is_away_loses_nothing(server: S3Server, tmp_path: Path) -> None:
    """It is away from the beginning to after the end; the job does not notice."""
    variables = {**server.environment, "DDLTRACE_UPLOAD_WAIT": "0"}
    job = on_ranks("ddp_cnn.py", "3")
    with server.away():
        done = run([*DDLTRACE, "run", "-o", RUN, "--", *job], cwd=tmp_path, **variables)
    assert done.status == 0, done.stderr
    assert "the store cannot be reached" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"to go on: ddltrace upload {tmp_path / 'run'}")
    assert "secret-of-the-test" not in done.stderr
    assert not contents(server, "run")
    sent = run([*DDLTRACE, "upload", "run"], cwd=tmp_path, **variables)
    assert sent.status == 0, sent.stderr
    assert contents(server, "run") == local(tmp_path / "run")
    analyzed = run([*DDLTRACE, "analyze", RUN, "--json"], cwd=tmp_path, **variables)
    found = json.loads(analyzed.stdout)["trace"]
    assert (found["status"], found["ranks"], found["steps"]) == ("complete", [0, 1], 3)
    again = run([*DDLTRACE, "run", "-o", RUN, "--", *job], cwd=tmp_path / "run", **variables)
    assert again.status == 2
    assert "has a trace: choose another with -o" in again.stderr


@pytest.mark.long
def test_a_store_that_hangs_does_not_delay_the_end(server: S3Server, tmp_path: Path) -> None:
    """It answers at the start and no more later; the status is that of the job all the same."""
    variables = {**server.environment, "DDLTRACE_UPLOAD_WAIT": "0"}
    job = ["sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7"]
    with subprocess.Popen(
        [*DDLTRACE, "run", "-o", f"s3://{BUCKET}/hanging", "--", *job],
        cwd=tmp_path,
        env=environment(**variables),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + LIMIT_S
        while "run.json" not in contents(server, "hanging"):
            assert time.monotonic() < deadline, "nothing was uploaded while the job ran"
            assert process.poll() is None, "the job ended"
            time.sleep(0.1)
        with server.hanging():
            (tmp_path / "go").touch()
            _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7
    last = stderr.strip().splitlines()[-1]
    assert "1 of 1 files is not in the store" in last
    assert "the store does not answer" in last
    assert last.endswith(f"to go on: ddltrace upload {tmp_path / 'hanging'}")
    with server.hanging():
        interrupted = subprocess.Popen(
            # A background job of a shell ignores the signal.
            [*("env", "--default-signal=INT"), *DDLTRACE, "upload", "hanging"],
            cwd=tmp_path,
            env=environment(**variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        server.wait_for_request()
        interrupted.send_signal(signal.SIGINT)
        _, stderr = interrupted.communicate(timeout=LIMIT_S)
    assert (interrupted.returncode, stderr.strip()) == (130, "ddltrace: interrupted")
    sent = run([*DDLTRACE, "upload", "hanging"], cwd=tmp_path, **variables)
    assert sent.status == 0, sent.stderr
    expected = local(tmp_path / "hanging")
    assert contents(server, "hanging") == expected
    # A run that cannot begin takes nothing from the store.
    (tmp_path / "hanging" / "run.json").rename(tmp_path / "hanging" / "other.json")
    options = ["-o", f"s3://{BUCKET}/hanging", "--force"]
    refused = run([*DDLTRACE, "run", *options, "--", "true"], cwd=tmp_path, **variables)
    assert refused.status == 2
    assert "is not a trace: --force overwrites only traces" in refused.stderr
    assert contents(server, "hanging") == expected


@pytest.mark.long
def test_files_of_a_killed_job_are_uploaded(server: S3Server, tmp_path: Path) -> None:
    """The launcher uploads while the job runs; after its death, another command goes on."""
    command = [
        *DDLTRACE,
        "run",
        "-o",
        f"s3://{BUCKET}/killed",
        "--",
        *on_ranks("ddp_cnn.py", "100000"),
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(**server.environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not {"run.json", ".arrows"} <= names_and_endings(server, "killed"):
            assert time.monotonic() < deadline, "nothing was uploaded while the job ran"
            assert process.poll() is None, "the job ended"
            time.sleep(0.5)
        early = json.loads(contents(server, "killed")["run.json"])
        assert early["status"] == "running"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    sent = run([*DDLTRACE, "upload", "killed"], cwd=tmp_path, **server.environment)
    assert sent.status == 0, sent.stderr
    found = contents(server, "killed")
    assert found == local(tmp_path / "killed")
    assert not [name for name in found if name.endswith(".arrows")]
    whole = json.loads(found["run.json"])
    assert whole["status"] == "partial"
    assert any("the launcher was killed" in note for note in whole["notes"])
    assert [rank["status"] for rank in whole["ranks"]] == ["killed", "killed"]


@pytest.mark.long
@pytest.mark.netns
def test_nodes_in_namespaces_with_directories_of_their_own(tmp_path: Path) -> None:
    """Each of two hosts with an address and a launcher of its own writes where no other reads."""
    node = 'mkdir disk-$RANK && exec "$@" run -o disk-$RANK/run -- "$PYTHON" "$JOB" 3'
    started = run(
        [
            *(sys.executable, "-m", "ddltrace.experiments.network.launch"),
            *("--hosts", "2", "--bandwidth", "400mbit", "--"),
            *("sh", "-c", node, "sh", *DDLTRACE),
        ],
        cwd=tmp_path,
        PYTHON=sys.executable,
        JOB=str(JOBS / "ddp_cnn.py"),
    )
    assert started.status == 0, started.stderr
    gathered = run([*DDLTRACE, "collect", "disk-0/run", "disk-1/run", "-o", "all"], cwd=tmp_path)
    assert gathered.status == 0, gathered.stderr
    trace = ddltrace.open(tmp_path / "all")
    assert (trace.ranks, trace.run.status, trace.notes) == ([0, 1], "complete", [])
    assert trace.analyze().joining.partial == 0
    alone = run([*DDLTRACE, "collect", "disk-1/run", "disk-2/run", "-o", "one"], cwd=tmp_path)
    assert "disk-2/run is left out" in alone.stderr
    assert "no trace of rank 0 of 2" in alone.stderr
