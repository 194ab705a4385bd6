"""What is exported of a GPU trace can be read by tools for Kineto's files, and by our reader."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.hta_reference import open_with_hta

from ddltrace.analyzer.exporters import export
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import UsageError

SEED = 20
KERNELS = ("sgemm_128x64_nn", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "elementwise_kernel")


def random_gpu_file(path: Path, rank: int) -> None:
    """Writes a Kineto file: steps, operators, calls, and what they launched on three streams."""
    random_of = random.Random(SEED + rank)
    base = {"ph": "X", "pid": 100 + rank, "tid": 100 + rank}
    events: list[dict[str, Any]] = []
    time, free, correlation = 1_000_000, {7: 0, 20: 0, 24: 0}, 10
    for step in range(3):
        begin = time
        for _ in range(40):
            time += random_of.randint(5, 60)
            length = random_of.randint(2, 9)
            copy = random_of.random() < 0.2
            stream = 24 if copy else random_of.choice([7, 7, 20])
            name = random_of.choice(KERNELS)
            operator = base | {"name": "aten::op", "cat": "cpu_op", "ts": time, "dur": length + 3}
            call = base | {"cat": "cuda_runtime", "ts": time + 1, "dur": length}
            call |= {"name": "cudaMemcpyAsync" if copy else "cudaLaunchKernel"}
            start = max(free[stream], time + 1 + length + random_of.randint(0, 40))
            duration = random_of.randint(1, 80)
            free[stream] = start + duration
            work = {"ph": "X", "pid": 0, "tid": stream, "ts": start, "dur": duration}
            work |= {"name": "Memcpy HtoD (Pinned -> Device)" if copy else name}
            work |= {"cat": "gpu_memcpy" if copy else "kernel"}
            args = {"correlation": correlation}
            work["args"] = (
                args | {"stream": stream, "device": 0} | ({"bytes": 4096} if copy else {})
            )
            events += [operator, call | {"args": args}, work]
            correlation += 1
            time += length + 4
        mark = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "ts": begin}
        events.append(base | mark | {"dur": time - begin})
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank}}
    path.write_text(json.dumps({**head, "traceEvents": events}, indent=1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kineto")
    for rank in range(2):
        random_gpu_file(folder / f"rank-{rank}.json", rank)
    return folder


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "per-rank"
    export(open_trace(source), "chrome", folder, per_rank=True)
    return folder


def test_device_work_names_its_call(exported: Path) -> None:
    for rank in range(2):
        value = json.loads(gzip.decompress((exported / f"rank-{rank}.json.gz").read_bytes()))
        assert value["distributedInfo"] == {"rank": rank, "world_size": 2}
        events = [event for event in value["traceEvents"] if event["ph"] == "X"]
        calls = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
        works = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy")]
        assert len(calls) == len(works) == 120
        for work in works:
            call = calls[work["args"]["correlation"]]
            assert call["ts"] + call["dur"] <= work["ts"]
            assert ("Memcpy" in call["name"]) == (work["cat"] == "gpu_memcpy")
            assert work["args"]["stream"] in (7, 20, 24)
        kinds = {e["args"].get("kind", e["cat"]) for e in works}
        assert kinds == {"kernel", "message", "copy"}


def test_hta_finds_in_the_export_what_it_finds_in_the_original(
    source: Path, exported: Path
) -> None:
    def numbers(folder: Path) -> dict[str, list[dict[str, Any]]]:
        found = open_with_hta(folder)
        launches = found.get_cuda_kernel_launch_stats(visualize=False)
        idle = found.get_idle_time_breakdown(visualize=False)[0]
        tables = {
            "overlap": found.get_comm_comp_overlap(visualize=False),
            "time": found.get_temporal_breakdown(visualize=False),
            "idle": idle.sort_values(["rank", "stream", "idle_category"]),
            **{f"launches of {rank}": launches[rank] for rank in launches},
        }
        return {
            name: table.drop(columns="correlation", errors="ignore").to_dict("records")
            for name, table in tables.items()
        }

    expected = numbers(source)
    assert len(expected["time"]) == 2
    assert expected["time"][0]["idle_time(us)"] > 0
    assert numbers(exported) == expected


def test_export_comes_back(source: Path, exported: Path, tmp_path: Path) -> None:
    one = tmp_path / "all.json"
    trace = open_trace(source)
    export(trace, "chrome", one)
    kept = ["start_ns", "end_ns", "kind", "name", "lane", "step"]
    for again in (formats.read(one), formats.read(exported)):
        assert again.run.source == "chrome"
        assert [info.rank for info in again.run.ranks] == [0, 1]
        for info in again.run.ranks:
            before = trace.events(info.rank).select(kept).to_pylist()
            after = again.tables[info.segment].select(kept).to_pylist()
            assert sorted(map(str, after)) == sorted(map(str, before))


def test_files_per_rank_are_refused_where_they_cannot_be(source: Path, tmp_path: Path) -> None:
    trace = open_trace(source)
    with pytest.raises(UsageError, match="--per-rank goes with --to chrome"):
        export(trace, "csv", tmp_path / "out", per_rank=True)
    (tmp_path / "note").write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        export(trace, "chrome", tmp_path, per_rank=True)
    with pytest.raises(UsageError, match="is a file"):
        export(trace, "chrome", tmp_path / "note", per_rank=True)
    export(trace, "chrome", tmp_path, per_rank=True, force=True)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"note", "rank-0.json.gz", "rank-1.json.gz"}
