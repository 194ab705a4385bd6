"""One S3-compatible server for all tests of a worker, and traces in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from support.long_trace import write_long_trace
from support.s3_server import BUCKET, S3Server

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "sample_traces" / "ddp-4-hosts-400mbit"


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    server = S3Server()
    server.filesystem().create_dir(BUCKET)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def environment(server: S3Server) -> Iterator[S3Server]:
    """The server, found through the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def sample(environment: S3Server) -> str:
    """URL of a copy of a sample trace."""
    put(environment, SAMPLE, "sample")
    return f"s3://{BUCKET}/sample"


@pytest.fixture(scope="module")
def long_trace(environment: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of several batches; a copy is in the bucket as ``long``."""
    directory = tmp_path_factory.mktemp("long") / "long"
    write_long_trace(directory, steps=12_000)
    put(environment, directory, "long")
    return directory


def put(server: S3Server, source: Path, name: str) -> None:
    """Copies a directory into the bucket."""
    fs.copy_files(
        str(source),
        f"{BUCKET}/{name}",
        source_filesystem=fs.LocalFileSystem(),
        destination_filesystem=server.filesystem(),
    )
