"""Files that are not read are named: written by their own programs where these are at hand."""

from __future__ import annotations

import cProfile
import json
import pickle
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest
import torch
from support.made_trace import made_trace

import ddltrace
from ddltrace.analyzer.exporters import perfetto as perfetto_export
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.other_files import is_mistakable, kind_of_file, kind_of_head
from ddltrace.tracer.errors import TraceError

ROOT = Path(__file__).resolve().parents[3]


def execution_trace(path):
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    torch.ones(2, 2) @ torch.ones(2, 2)
    observer.stop()
    observer.unregister_callback()


def memory_snapshot(path):
    block = {"device": 0, "address": 1, "total_size": 512, "blocks": [], "segment_type": "small"}
    snapshot = {"segments": [block], "device_traces": [[]], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(snapshot | {"external_annotations": [], "version": 1}))


def database(table):
    def write(path):
        connection = sqlite3.connect(path)
        connection.execute(f"create table {table} (start int, end int)")
        connection.commit()
        connection.close()

    return write


def profile(path):
    run = cProfile.Profile()
    run.runcall(sorted, [2, 1])
    run.dump_stats(path)


def content(data):
    return lambda path: path.write_bytes(data)


def perfetto(path):
    perfetto_export.write(made_trace(), path)


def event_file(path):
    record = b"\x09" + struct.pack("<d", 1.5e9) + b"\x1a\x0dbrain.Event:2"
    path.write_bytes(struct.pack("<QI", len(record), 0) + record + bytes(4))


WRITERS = [
    ("PyTorch memory snapshot", memory_snapshot),
    ("PyTorch execution trace", execution_trace),
    ("trace of Perfetto", perfetto),
    ("TensorBoard event file", event_file),
    ("Nsight Compute", content(b"NVR\0" + bytes(64))),
    ("database that Nsight Systems exported", database("CUPTI_ACTIVITY_KIND_KERNEL")),
    ("an SQLite database, which", database("anything")),
    ("checkpoint of PyTorch", lambda path: torch.save({"w": torch.ones(2)}, path)),
    (
        "checkpoint of PyTorch",
        lambda path: torch.save([torch.ones(2)], path, _use_new_zipfile_serialization=False),
    ),
    ("safetensors", content(struct.pack("<Q", 40) + b'{"w":{"dtype":"F32"}}')),
    ("XLA or JAX", content(b"\x0a\x10\x08\x01\x12\x09/host:CPU" + bytes(3))),
    ("speedscope", content(b'{"$schema":"https://www.speedscope.app/file-format-schema.json"}')),
    ("cProfile", profile),
    ("core dump", content(b"\x7fELF\2\1\1" + bytes(9) + b"\4\0" + bytes(40))),
    ("results of an experiment", content(b'{\n "schema": "ddltrace.experiment/1"}')),
    ("record of a trace", content(b'{\n "schema": "ddltrace.trace/1"}')),
    ("HTML report of ddltrace", content(b"<!doctype html>\n<title>a - ddltrace</title>")),
    ("zstd", content(b"\x28\xb5\x2f\xfd" + bytes(9))),
    ("empty", content(b"")),
]


@pytest.mark.parametrize(("what", "write"), WRITERS, ids=[what for what, _ in WRITERS])
def test_a_file_is_named_whatever_its_name(tmp_path, what, write):
    # The name says something else; a folder of it says the same.
    file = tmp_path / "folder" / "trace.json"
    file.parent.mkdir()
    write(file)
    for path in (file, file.parent):
        with pytest.raises(TraceError, match=what) as caught:
            ddltrace.open(path)
        assert "\n" not in str(caught.value)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["a.nsys-rep", "b.qdrep"])
def test_a_report_without_a_known_mark_is_named_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(bytes(range(200)))
    with pytest.raises(TraceError, match="by its name a report of NVIDIA Nsight Systems"):
        ddltrace.open(tmp_path / name)


def test_what_is_read_is_not_named(tmp_path):
    samples = [
        *ROOT.glob("tests/data/foreign/*/*"),
        *ROOT.glob("../shared/data/kineto-dlrm/*.gz"),
        *ROOT.glob("../shared/data/public/**/*.json*"),
        *ROOT.glob("../shared/data/public/fr_*/*"),
    ]
    chrome = tmp_path / "chrome.json"
    chrome.write_text(json.dumps({"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "name": "a"}]}))
    assert len(samples) > 3
    for file in [*samples, chrome]:
        if formats.recognizes(file):
            assert kind_of_file(file) is None, file


def test_a_hostile_head_is_no_error():
    for head in (b"", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x80", b"{"):
        assert kind_of_head(head) is None
        assert not is_mistakable(head)


def test_readable_files_beside_an_unreadable_one_are_read(tmp_path):
    for file in (ROOT / "tests/data/foreign/kineto-cpu").iterdir():
        shutil.copy(file, tmp_path)
    memory_snapshot(tmp_path / "snapshot.pickle")
    assert ddltrace.open(tmp_path).ranks == [0, 1]
