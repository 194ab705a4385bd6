"""Messages of CUDA graphs (interpose/cuda_graphs.py): captures and replays are played."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from ddltrace.tracer.interpose import operators
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.interpose.cuda_graphs import CudaGraphs, GraphKernels
from ddltrace.tracer.interpose.operators import OperatorWindow
from ddltrace.tracer.interpose.patches import Patches
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Message, Recorder


class Graphs:
    """A job's graphs, whose class the tracer has patched."""

    def __init__(self) -> None:
        class Graph:
            def capture_begin(self, pool: object = None) -> str:
                return "begun"

            def capture_end(self) -> None:
                pass

            def replay(self) -> str:
                return "replayed"

            def reset(self) -> None:
                pass

        self.new = Graph
        self.faults: list[tuple[str, Exception]] = []
        self.recorder = Recorder(1000)
        self.graphs = CudaGraphs(self.recorder, lambda *fault: self.faults.append(fault))
        self.graphs.patch(Graph, Patches())
        self.group = Group("0", (0, 1), 0)

    def send(self, op: str, size: int, peer: int | None = None) -> None:
        """Launches a message into the stream that is captured."""
        message = Message(-1, op, "0", 77, "dispatcher")
        message.bytes, message.peer, message.tensors = size, peer, [4]
        self.graphs.add(message, self.group)

    def rows(self) -> list[dict[str, Any]]:
        batch = BatchBuilder(self.recorder.sites, self.recorder.patterns).build(
            self.recorder.take()
        )
        return [] if batch is None else batch.to_pylist()


@pytest.fixture
def job() -> Graphs:
    return Graphs()


def captured(job: Graphs, *sizes: int) -> Any:
    graph = job.new()
    assert graph.capture_begin(pool=1) == "begun"
    for size in sizes:
        job.send("all_reduce", size)
    graph.capture_end()
    return graph


def test_a_capture_sends_nothing_and_each_replay_does(job: Graphs) -> None:
    graph = captured(job, 16, 32)
    [first, second] = job.rows()
    assert (first["kind"], first["name"], first["bytes"]) == ("marker", "captured all_reduce", 16)
    assert (first["id"], second["bytes"]) == (None, 32)
    job.group.next_collective()  # one between the replays
    for _ in range(2):
        assert graph.replay() == "replayed"
    rows = job.rows()
    assert [(row["kind"], row["op"], row["bytes"], row["seq"]) for row in rows] == [
        ("message", "all_reduce", 16, 1),
        ("message", "all_reduce", 32, 2),
        ("message", "all_reduce", 16, 3),
        ("message", "all_reduce", 32, 4),
    ]
    for row in rows:
        assert (row["status"], row["end_ns"], row["clock"]) == ("ok", None, "graph")
        assert row["seam"] == "graph"
        assert row["start_ns"] == row["enqueue_ns"] > 77
        assert row["tensors"] == [4]
    assert len({row["id"] for row in rows}) == 4
    assert job.faults == []


def test_what_is_in_no_graph_is_not_replayed(job: Graphs) -> None:
    graph, empty = captured(job, 16), captured(job)
    job.send("all_reduce", 64)  # a capture that PyTorch's class has not begun
    one, other = job.new(), job.new()
    one.capture_begin()
    other.capture_begin()
    job.send("all_reduce", 128)  # of one of two
    one.capture_end()
    other.capture_end()
    assert [row["bytes"] for row in job.rows()] == [16, 64, 128]
    for each in (empty, one, other):
        each.replay()
    assert job.rows() == []
    graph.reset()
    graph.replay()
    assert job.rows() == []
    del graph
    gc.collect()
    assert job.faults == []


def test_sends_of_a_graph_are_numbered_as_others_are(job: Graphs) -> None:
    graph = job.new()
    graph.capture_begin()
    job.send("send", 8, peer=1)
    graph.capture_end()
    graph.replay()
    graph.replay()
    rows = [row for row in job.rows() if row["kind"] == "message"]
    assert [(row["seq"], row["peer"]) for row in rows] == [(0, 1), (1, 1)]


def test_pauses_keep_the_numbers(job: Graphs) -> None:
    graph = captured(job, 16)
    job.rows()
    job.recorder.paused = True
    graph.replay()
    job.recorder.paused = False
    graph.replay()
    assert [row["seq"] for row in job.rows()] == [1]


def test_kernels_give_the_times_of_replays(job: Graphs) -> None:
    graph = captured(job, 16, 32)
    job.graphs.replays.clear()
    graph.replay()
    graph.replay()
    job.rows()
    kernels = GraphKernels(list(job.graphs.replays))
    for launch, correlation in enumerate((5, 6, 7)):
        kernels.add_launch(launch, correlation)  # 6 is a graph without messages
    kernels.add_kernel(300, 320, 5)
    kernels.add_kernel(100, 140, 5)
    kernels.add_kernel(500, 510, 7)  # of one of two messages: it is not known which
    job.recorder.finished.extend(kernels.timed())
    rows = job.rows()
    assert [(r["bytes"], r["start_ns"], r["end_ns"], r["clock"]) for r in rows] == [
        (16, 100, 140, "kernel"),
        (32, 300, 320, "kernel"),
    ]
    unmatched = GraphKernels([])
    unmatched.add_launch(1, 5)
    unmatched.add_kernel(1, 2, 5)
    assert unmatched.timed() == []


def test_the_window_finds_the_kernels_of_a_graph(
    job: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = captured(job, 16)
    graph.replay()
    job.rows()

    def event(name: str, start: int, duration: int, *, device: str, mark: bool = False) -> Any:
        values = {
            "name": name,
            "start_ns": start,
            "duration_ns": duration,
            "device_type": f"DeviceType.{device}",
            "correlation_id": 9,
            "is_async": False,
            "is_hidden_event": False,
            "is_user_annotation": mark,
            "start_thread_id": 1,
            "device_resource_id": 7,
        }
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    events = [
        event("cudaGraphLaunch", 10, 5, device="CPU"),
        event("nccl:all_reduce", 18, 90, device="CUDA", mark=True),
        event("ncclDevKernel_AllReduce_Sum", 20, 30, device="CUDA"),
        event("gemm_kernel", 60, 4, device="CUDA"),
    ]
    monkeypatch.setattr(operators, "paired_reading", lambda: {"monotonic_ns": 1000, "unix_ns": 0})
    context: Any = SimpleNamespace(
        recorder=job.recorder,
        graphs=job.graphs,
        fault=lambda *fault: job.faults.append(fault),
    )
    results = SimpleNamespace(events=lambda: events)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    OperatorWindow(context, 0, 1)._fold(profiler, GraphKernels(list(job.graphs.replays)))
    assert job.faults == []
    rows = {row["name"]: row for row in job.rows()}
    assert set(rows) == {"cudaGraphLaunch", "gemm_kernel", "all_reduce"}
    message = rows["all_reduce"]
    assert (message["start_ns"], message["end_ns"], message["clock"]) == (1020, 1050, "kernel")
