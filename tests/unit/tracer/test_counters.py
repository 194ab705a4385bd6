"""Resource counters: read from the system, written to the trace, read back."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddltrace.tracer.interpose.device_memory import patch
from ddltrace.tracer.resources import counter_thread, step_processor_time
from ddltrace.tracer.resources.counter_thread import CounterThread
from ddltrace.tracer.resources.host_counters import HostCounters
from ddltrace.tracer.resources.nvml_counters import NvmlCounters
from ddltrace.tracer.trace.counters import Reading, read_counters
from ddltrace.tracer.trace.event_file import counters_match_checksum
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run, write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import counters_name, segment_name
from ddltrace.tracer.trace.trace_parts import merge

SEGMENT = segment_name(rank=0, attempt=0, pid=7)


def record(directory: Path) -> None:
    """Writes the counters of this process through the real thread."""
    faults: list[Exception] = []
    thread = CounterThread(
        directory / f"{counters_name(SEGMENT)}.arrows",
        whole_host=True,
        step=lambda: 5,
        rests=lambda: False,
        on_fault=lambda _, error: faults.append(error),
        interval_s=0.05,
    )
    thread.start()
    thread.add(1, 4, Reading("device_allocated_peak", 7.0, "GPU-1"))
    thread.stop(10)
    assert not thread.is_alive()
    assert not faults


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of one rank whose process is gone, with counters and without events."""
    directory = tmp_path / "trace"
    directory.mkdir()
    write_run(directory, RunInfo())
    write_sidecar(directory, RankInfo(rank=0, segment=SEGMENT))
    record(directory)
    return directory


def rows_of(directory: Path) -> list[dict[str, Any]]:
    table, lost = read_counters(directory, SEGMENT)
    assert lost == 0
    return list(table.to_pylist())


def test_counters_are_the_same_after_finalizing_and_merging(trace: Path, tmp_path: Path) -> None:
    streamed = rows_of(trace)
    names = {row["name"] for row in streamed}
    assert {"process_memory", "host_memory_total", "network_sent"} <= names
    assert all(row["step"] == (4 if row["instance"] == "GPU-1" else 5) for row in streamed)
    finalize(trace, RunInfo())
    assert not list(trace.glob("*.arrows"))
    info = read_run(trace).ranks[0]
    assert rows_of(trace) == streamed
    assert info.counters == len(streamed)
    assert counters_match_checksum(trace, info)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge([trace], merged)
    assert rows_of(merged) == streamed


def test_a_fork_during_a_slow_sample_is_no_fault(tmp_path: Path, monkeypatch: Any) -> None:
    """`pause` times out, so `resume` must not release the lock that the sample still holds."""
    monkeypatch.setattr(counter_thread, "_MAX_PAUSE_S", 0.01)
    sampling, may_end = threading.Event(), threading.Event()
    faults: list[Exception] = []

    def step() -> int:
        sampling.set()
        assert may_end.wait(60)
        return 5

    thread = CounterThread(
        tmp_path / f"{counters_name(SEGMENT)}.arrows",
        whole_host=False,
        step=step,
        rests=lambda: False,
        on_fault=lambda _, error: faults.append(error),
    )
    thread.start()
    assert sampling.wait(60)
    thread.pause()
    thread.resume()
    may_end.set()
    thread.stop(60)
    assert not thread.is_alive()
    assert faults == []


def test_damage_is_found(trace: Path) -> None:
    finalize(trace, RunInfo())
    path = trace / f"{counters_name(SEGMENT)}.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not counters_match_checksum(trace, read_run(trace).ranks[0])


def test_a_cut_stream_keeps_every_whole_sample(trace: Path) -> None:
    stream = trace / f"{counters_name(SEGMENT)}.arrows"
    whole = rows_of(trace)
    content = stream.read_bytes()
    stream.write_bytes(content[:-40])  # the end mark has 8 bytes
    table, lost = read_counters(trace, SEGMENT)
    assert lost > 0
    assert 0 < len(table) < len(whole)
    assert table.to_pylist() == whole[: len(table)]
    run = finalize(trace, RunInfo())
    assert f"of the counters, the last {lost:,} bytes are unreadable" in " ".join(
        run.ranks[0].errors
    )
    assert rows_of(trace) == whole[: len(table)]


def test_a_trace_without_counters_has_none(tmp_path: Path) -> None:
    assert len(read_counters(tmp_path, SEGMENT)[0]) == 0


def test_host_counters_are_those_of_the_system() -> None:
    counters = HostCounters(whole_host=True)
    first = {(r.name, r.instance): r.value for r in counters.sample()}
    size = 1 << 22
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        sending = threading.Thread(target=lambda: (sender.sendall(bytes(size)), sender.close()))
        sending.start()
        received = 0
        while piece := receiver.recv(1 << 16):
            received += len(piece)
        sending.join()
        receiver.close()
    assert received == size
    busy_until = time.process_time() + 0.1
    while time.process_time() < busy_until:
        pass
    second = {(r.name, r.instance): r.value for r in counters.sample()}
    assert second["host_processors", None] == psutil.cpu_count()
    assert second["host_memory_total", None] == psutil.virtual_memory().total
    assert second["process_memory", None] == pytest.approx(
        psutil.Process().memory_info().rss, rel=0.1
    )
    assert second["network_sent", "lo"] - first["network_sent", "lo"] >= size
    assert second["network_received", "lo"] - first["network_received", "lo"] >= size
    # The kernel counts in ticks of 10 ms, so a short interval can show a little too much.
    assert 0 < second["process_cpu", None] <= psutil.cpu_count() + 1
    assert 0 < second["host_cpu", None] <= 1


def test_processor_time_is_read_at_ends_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, int | None, Reading]] = []
    sink: Any = SimpleNamespace(add=lambda *values: added.append(values))
    now_ns = 0
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns, process_time=lambda: now_ns / 2e9)
    monkeypatch.setattr(step_processor_time, "time", clock)
    processor_time = step_processor_time.StepProcessorTime(sink)
    for step in range(7):
        now_ns = 1_000_000_000 + step * 90_000_000
        processor_time.after_step(step)
    # At most every 0.2 s: a step takes 0.09 s.
    assert [step for _, step, _ in added] == [0, 3, 6]
    assert added[1] == (1_270_000_000, 3, Reading("process_cpu_time", 0.635))


def test_only_one_rank_reads_the_counters_of_a_host() -> None:
    names = {reading.name for reading in HostCounters(whole_host=False).sample()}
    assert names
    assert all(name.startswith("process_") for name in names)


class FakeNvml:
    """The functions of NVML that are used, for one device without a power meter."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self) -> None:
        self.initialized = False

    def nvmlInit(self) -> None:
        self.initialized = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.initialized or uuid != "GPU-7":
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        return SimpleNamespace(gpu=83, memory=10)

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        raise self.NVMLError

    def nvmlDeviceGetTemperature(self, device: str, sensor: int) -> int:
        return {self.NVML_TEMPERATURE_GPU: 64}[sensor]

    def nvmlDeviceGetClockInfo(self, device: str, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: str) -> int:
        return 0x40


def test_device_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = {r.name: (r.value, r.instance) for r in NvmlCounters("GPU-7").sample()}
    assert found == {
        "device_utilization": (0.83, "GPU-7"),
        "device_memory_used": (3 << 30, "GPU-7"),
        "device_memory_total": (80 << 30, "GPU-7"),
        "device_temperature": (64, "GPU-7"),
        "device_sm_clock": (1755, "GPU-7"),
        "device_memory_clock": (2619, "GPU-7"),
        "device_throttling": (0x40, "GPU-7"),
    }
    with pytest.raises(FakeNvml.NVMLError):
        NvmlCounters("GPU-8")


@pytest.mark.gpu
def test_device_counters_of_a_real_device() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    found = {r.name: r.value for r in NvmlCounters(uuid).sample()}
    assert found["device_memory_total"] == pytest.approx(
        torch.cuda.get_device_properties(0).total_memory, rel=0.1
    )
    assert 0 < found["device_temperature"] < 120


@dataclass
class Allocator:
    """An allocator with the statistics of PyTorch's, as `torch._C` gives them."""

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0

    def _cuda_memoryStats(self, device: int) -> dict[str, Any]:
        return {
            "num_ooms": 0,
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.allocated_peak}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved_peak}},
        }

    def _cuda_resetPeakMemoryStats(self, device: int) -> None:
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def use(self, size: int) -> None:
        self.allocated = size
        self.allocated_peak = max(self.allocated_peak, size)
        self.reserved = max(self.reserved, size)
        self.reserved_peak = max(self.reserved_peak, self.reserved)


@pytest.mark.parametrize("seed", range(20))
def test_peaks_of_steps_do_not_change_what_the_job_reads(seed: int) -> None:
    """Random use, beside an allocator that is not traced."""
    choose = random.Random(seed)
    traced, plain = Allocator(), Allocator()
    peaks = patch(traced)
    largest = 0
    for _ in range(200):
        what = choose.choice(("use", "use", "use", "step", "read", "reset"))
        if what == "use":
            size = choose.randrange(1000)
            largest = max(largest, size)
            traced.use(size), plain.use(size)
        elif what == "step":
            assert peaks.end_step(0).allocated == largest
            largest = traced.allocated
        elif what == "read":
            assert traced._cuda_memoryStats(0) == plain._cuda_memoryStats(0)
        else:
            traced._cuda_resetPeakMemoryStats(0)
            plain._cuda_resetPeakMemoryStats(0)
