"""The ends of processes, seen from outside."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import STATUS_REMAINS

from ddltrace.tracer.launch.rank_ends import RankEnds
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.liveness import pid_namespace
from ddltrace.tracer.trace.run_files import write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.trace_files import segment_name

WAITS = [sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline()))"]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started = [subprocess.Popen(WAITS, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def info_of(rank: int, process: subprocess.Popen[str]) -> RankInfo:
    segment = segment_name(rank=rank, attempt=0, pid=process.pid)
    info = RankInfo(rank, segment, pid=process.pid, pid_namespace=pid_namespace())
    info.host, info.clock_domain = platform.node(), clock_domain()
    return info


def seen(watch: RankEnds, segment: str) -> bool:
    """Waits until an end was seen, or for a minute."""
    deadline = time.monotonic() + 60
    while segment not in watch.ends and time.monotonic() < deadline:
        time.sleep(0.01)
    return segment in watch.ends


def test_each_end_is_seen_when_it_comes(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    watch = RankEnds(tmp_path)
    watch.start()
    segments = []
    for rank, process in enumerate(processes):
        info = info_of(rank, process)
        segments.append(info.segment)
        write_sidecar(tmp_path, info)
    while len(watch._watched) < len(processes):
        time.sleep(0.01)
    before = time.monotonic_ns()
    processes[1].send_signal(signal.SIGKILL)
    assert seen(watch, segments[1])
    processes[0].communicate("3\n", timeout=60)
    assert seen(watch, segments[0])
    watch.stop()
    last, first = (watch.ends[segment] for segment in segments[:2])
    assert before < first.ended_ns < last.ended_ns
    assert first.exit_status == 128 + signal.SIGKILL
    # We were waiting for it, too.
    assert last.exit_status == 3 or (last.exit_status is None and not STATUS_REMAINS)
    assert segments[2] not in watch.ends  # it still runs


def test_one_that_has_died_before_it_is_found_has_ended_by_then(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    watch = RankEnds(tmp_path)
    before = time.monotonic_ns()
    infos = [info_of(rank, process) for rank, process in enumerate(processes)]
    for info, process in zip(infos, processes, strict=True):
        process.kill()
        process.communicate()
        info.clock = {"monotonic_ns": time.monotonic_ns()}
    infos[1].clock = {"monotonic_ns": before - 10**9}  # it was here before
    infos[2].status = "complete"
    for info in infos:
        write_sidecar(tmp_path, info)
    watch.start()
    assert seen(watch, infos[0].segment)
    watch.stop()
    assert set(watch.ends) == {infos[0].segment}
    assert watch.ends[infos[0].segment].exit_status is None
    assert before < watch.ends[infos[0].segment].ended_ns < time.monotonic_ns()


def test_processes_of_elsewhere_are_not_taken_for_those_here(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    changes = ({"host": "other"}, {"pid_namespace": "pid:[1]"}, {"clock_domain": "other"})
    for rank, (process, change) in enumerate(zip(processes, changes, strict=True)):
        info = info_of(rank, process)
        for name, value in change.items():
            setattr(info, name, value)
        write_sidecar(tmp_path, info)
        process.kill()
    (tmp_path / "rank-9.json").write_text("{")
    watch = RankEnds(tmp_path)
    watch.start()
    time.sleep(0.3)
    watch.stop()
    assert watch.ends == {}


def test_a_directory_that_vanishes_ends_it(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    directory.mkdir()
    watch = RankEnds(directory)
    watch.start()
    shutil.rmtree(directory)
    watch.join(10)
    assert not watch.is_alive()
    watch.stop()
