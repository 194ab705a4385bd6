"""The times of Gloo's messages: noted by Gloo where the hook can be compiled, else by reapers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pandas as pd
import pytest
from support.jobs import DDLTRACE, ONE_RANK, Done, on_ranks, run, traced
from support.traces import read_last_rows

from ddltrace.tracer.native import build as native_build
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.run_reader import read_run

QUEUE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
large, small = [torch.ones(10_000_000) for _ in range(4)], torch.ones(2)
dist.barrier()
works = [dist.all_reduce(tensor, async_op=True) for tensor in (*large, small)]
while not works[0].is_completed():
    pass
for work in works[1:]:
    work.wait()
dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4))
dist.all_gather([torch.zeros(2)] * 2, small)
"""

FAILS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os._exit(0)
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
time.sleep(2)
"""

FORKS = """
import os, signal
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor, weights = torch.ones(4), torch.ones(8, requires_grad=True)
for _ in range(300):
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(40)]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        weights.sum().backward()
        os._exit(0)
    for work in works:
        work.wait()
    assert os.waitpid(child, 0)[1] == 0
"""

SPARSE = """
import time
import torch, torch.distributed as dist
from ddltrace.tracer.interpose.c10d.message_descriptions import Descriptions
describe = Descriptions.describe
def late(*args, **kwargs):
    time.sleep(0.05)  # so that Gloo is done before
    return describe(*args, **kwargs)
Descriptions.describe = late
dist.init_process_group("gloo")
for count in range(2, 6):
    indices = torch.zeros(1, count, dtype=torch.long)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(count), (5,), check_invariants=True)
    dist.all_reduce(tensor)
    assert tensor._indices().numel() == 1
"""

needs_compiler = pytest.mark.skipif(
    native_build.compiler() is None, reason="no C++ compiler on this machine"
)


def record(tmp_path: Path, script: str, **environment: str) -> tuple[Done, list[RankInfo]]:
    (tmp_path / "job.py").write_text(script)
    trace = tmp_path / "trace"
    done = run(traced(trace, on_ranks(tmp_path / "job.py"), "--force"), cwd=tmp_path, **environment)
    assert done.status == 0, done.stderr
    infos = read_run(trace).ranks
    assert [info.errors for info in infos] == [[], []]
    return done, infos


def messages(tmp_path: Path, info: RankInfo) -> pd.DataFrame:
    frame = read_last_rows(tmp_path / "trace", info.segment)[0].to_pandas()
    frame = frame[frame.kind == "message"].drop_duplicates("id", keep="last")
    return frame.sort_values("id").reset_index(drop=True)


def without_compiler() -> str:
    return os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not any((Path(folder) / name).exists() for name in ("c++", "g++", "clang++"))
    )


@pytest.mark.long
@needs_compiler
def test_it_is_compiled_once_and_sees_a_message_leave_the_queue(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done, infos = record(tmp_path, QUEUE, XDG_CACHE_HOME=cache)
    assert "compiling for this PyTorch, once" in done.stderr
    for info in infos:
        assert info.gloo_times
        found = messages(tmp_path, info)
        assert set(found.status) == {"ok"}
        reduced = found[found.op == "all_reduce"]
        # Gloo runs two messages of a group at a time, in the order of their launch.
        starts, ends = reduced.start_ns.to_numpy(), reduced.end_ns.to_numpy()
        for later in range(2, len(reduced)):
            assert reduced.enqueue_ns.iloc[later] < min(ends[:later])
            assert starts[later] > sorted(ends[:later])[later - 2]
    done, _ = record(tmp_path, QUEUE, XDG_CACHE_HOME=cache)
    assert "compiling" not in done.stderr


def test_without_a_compiler_the_same_is_recorded(tmp_path: Path) -> None:
    wanted = ["op", "seq", "bytes", "dtype", "status", "group"]
    _, infos = record(tmp_path, QUEUE)
    native = [messages(tmp_path, info)[wanted] for info in infos]
    for info in infos:
        assert set(messages(tmp_path, info).clock) <= {"gloo", "wait"}
        assert (messages(tmp_path, info).clock == "gloo").sum() >= 6
    done, infos = record(
        tmp_path, QUEUE, PATH=without_compiler(), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert "compiling" not in done.stderr
    for info, expected in zip(infos, native, strict=True):
        assert not info.gloo_times
        assert messages(tmp_path, info)[wanted].equals(expected)
        assert set(messages(tmp_path, info).clock) <= {"thread", "wait", "polling"}
        assert "wait" in set(messages(tmp_path, info).clock)


@pytest.mark.long
def test_a_compiler_that_fails_is_tried_once_and_told_of_each_time(tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'x.h:1: error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environment = {
        "PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done, infos = record(tmp_path, QUEUE, **environment)
    assert "does not compile: x.h:1: error: out of luck" in done.stderr
    assert not any(info.gloo_times for info in infos)
    assert "Traceback" not in done.stderr
    done, infos = record(tmp_path, QUEUE, **environment)
    assert "compiling for this PyTorch" not in done.stderr
    assert done.stderr.count("out of luck") == 1
    assert all("out of luck" in str(info.native_missing) for info in infos)
    assert read_run(tmp_path / "trace").status == "complete"


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_message_that_fails_is_marked(tmp_path: Path, native: str) -> None:
    _, infos = record(tmp_path, FAILS, DDLTRACE_NATIVE=native)
    found = messages(tmp_path, infos[0]).set_index("op")
    assert found.status["all_reduce"] == "failed"
    assert found.end_ns["all_reduce"] - found.start_ns["all_reduce"] < 1.9e9


def test_of_a_sparse_tensor_is_told_what_was_sent(tmp_path: Path) -> None:
    """Gloo puts the sum in its place, which may have another size."""
    _, infos = record(tmp_path, SPARSE)
    for info in infos:
        found = messages(tmp_path, info)
        assert list(found.bytes) == [count * (8 + 4) for count in range(2, 6)]


@pytest.mark.long
def test_children_forked_while_gloo_works_can_train(tmp_path: Path) -> None:
    """Gloo's threads hold no lock that a child would wait for."""
    (tmp_path / "job.py").write_text(FORKS)
    job = traced(tmp_path / "trace", [sys.executable, str(tmp_path / "job.py")])
    done = run(job, cwd=tmp_path, **ONE_RANK)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace").ranks[0]
    assert info.gloo_times == (native_build.compiler() is not None)
    assert len(messages(tmp_path, info)) == 12_000


@pytest.mark.long
def test_what_cannot_be_loaded_is_left(tmp_path: Path) -> None:
    """Something has damaged what was compiled: to load it could end the job."""
    library = native_build.installed()
    if library is None:
        pytest.skip("nothing was compiled")
    cache = tmp_path / "cache" / "ddltrace"
    cache.mkdir(parents=True)
    (cache / library.name).write_bytes(library.read_bytes()[:9000])
    _, infos = record(tmp_path, QUEUE, PATH=without_compiler(), XDG_CACHE_HOME=str(cache.parent))
    for info in infos:
        assert not info.gloo_times
        assert set(messages(tmp_path, info).status) == {"ok"}
    done = run([*DDLTRACE, "doctor"], cwd=tmp_path, XDG_CACHE_HOME=str(cache.parent))
    assert "compiled for this PyTorch" in done.stdout
    assert (cache / library.name).stat().st_size > 9000


def test_nothing_of_torch_is_imported_to_compile() -> None:
    done = run(
        [
            sys.executable,
            "-c",
            "import sys; from ddltrace.tracer.native import build as b; b.is_wanted(); "
            "b.installed(); assert 'torch' not in sys.modules",
        ],
        cwd=Path.cwd(),
    )
    assert done.status == 0, done.stderr
