"""`analyze --to`: real trackers, in the ways in which they work without a server."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "straggler"


def analyze(tracker: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder; returns what it did."""
    command = [sys.executable, "-m", "ddltrace", "analyze", str(SAMPLE), "--json", "--to", tracker]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """The summary that the command printed, which nothing of the tracker's disturbs."""
    assert done.returncode == 0, done.stderr
    assert "ddltrace: logged to" in done.stderr
    summary: dict[str, float] = json.loads(done.stdout)["summary"]
    return summary


def test_tensorboard_events_are_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    summary = summary_of(analyze("tensorboard", tmp_path))
    [folder] = (tmp_path / "runs").iterdir()
    [file] = folder.glob("events.*")
    data, values, at = file.read_bytes(), {}, 0
    while at < len(data):  # length, its checksum, the event, its checksum
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        values |= {value.tag: value for value in event.summary.value}
        at += 12 + length + 4
    ratio = values["ddltrace/overlap_ratio"].simple_value
    assert ratio == pytest.approx(summary["overlap_ratio"], rel=1e-6)
    assert any(tag.startswith("ddltrace/report") for tag in values)
    assert "<html" in (folder / "ddltrace-report.html").read_text("utf-8")


def test_an_mlflow_store_holds_the_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    store = (tmp_path / "store").as_uri()
    opened = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    summary = summary_of(analyze("mlflow", tmp_path, **opened))
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(store)
    [run] = client.search_runs(["0"])
    assert run.data.metrics["ddltrace/overlap_ratio"] == summary["overlap_ratio"]
    assert run.data.metrics["ddltrace/step_us.p50"] == summary["step_us"]["p50"]
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == [
        "ddltrace-report.html"
    ]


def test_wandb_records_a_run_offline(tmp_path):
    pytest.importorskip("wandb")
    done = analyze("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    summary_of(done)
    [record] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"ddltrace/overlap_ratio" in record.read_bytes()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html"))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_package_is_one_line(tracker, tmp_path):
    blocked = tmp_path / "blocked"
    module = {"tensorboard": "tensorboardX"}.get(tracker, tracker)
    (blocked / module).mkdir(parents=True)
    (blocked / module / "__init__.py").write_text("raise ImportError('blocked')")
    done = analyze(tracker, tmp_path, PYTHONPATH=str(blocked))
    assert done.returncode != 0
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"pip install 'ddltrace[{tracker}]'" in line
