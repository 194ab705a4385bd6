"""When gradients became ready: taken down in C++, by a function of Python where need be."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from support.jobs import JOBS, ONE_RANK, Done, at_once, run, traced
from support.traces import read_last_rows

from ddltrace.tracer.native import build as native_build
from ddltrace.tracer.trace.run_reader import read_run

needs_compiler = pytest.mark.skipif(
    native_build.compiler() is None, reason="no C++ compiler on this machine"
)

FULL = """
import threading
import torch
from ddltrace.tracer.naming.gradient_ready_times import NativeGradients
from ddltrace.tracer.native.build import installed
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.naming.ready_gradients import ReadyGradients
from ddltrace.tracer.naming.registry import Registry

SIZE = 1 << 15
recorder = Recorder(SIZE + 1000)
ready = ReadyGradients()
gradients = NativeGradients(NativeLibrary(installed()), recorder, ready)
registry = Registry(recorder, ready, gradients)
layer = torch.nn.Linear(1, 1)
((tensor, weight), _) = registry.add_model(layer)
site = recorder.site("gradient", "weight", tensor)
assert gradients.watch(tensor, weight, site)

def train(times):
    for _ in range(times):
        weight.sum().backward()

train(SIZE + 500)
gradients.collect()
assert set(recorder.more[::4]) == {site}
assert len(recorder.more) == 4 * SIZE
assert recorder.more[3] == threading.get_ident()
times = list(recorder.more[1::4])
assert times == sorted(times) == list(recorder.more[2::4])
assert gradients.newest_ns > times[-1]  # there was no room for it
assert len(registry.ready) == SIZE
assert recorder.dropped == 500  # the ring had no room for
train(2000)
gradients.collect()
assert recorder.dropped == 500 + 2000 - 1000  # and the recorder
registry.forget_gradients()
gradients.begin_backward(paused=True)
train(10)
gradients.collect()
assert registry.ready == registry.ready_in_backward == []
gradients.begin_backward(paused=False)
assert gradients.newest_ns == 0
train(3)
gradients.begin_backward(paused=False)
train(4)
gradients.collect()
assert (len(registry.ready), len(registry.ready_in_backward)) == (7, 4)
train(3)
gradients.end_step()
train(1)
gradients.collect()
assert (len(registry.ready), len(registry.ready_in_backward)) == (1, 8)
train(SIZE // 2 + 1)
gradients.begin_backward(paused=False)  # without a writer
assert len(registry.ready) == SIZE // 2 + 2
gradients.abandon()
train(10)
gradients.collect()
assert registry.ready_in_backward == []
del layer, weight
assert gradients._watched.live_keys() == []
"""


def gradients(trace: Path) -> pd.DataFrame:
    """In the order in which they became ready."""
    (info,) = read_run(trace).ranks
    assert info.errors == []
    table, lost = read_last_rows(trace, info.segment)
    assert lost == 0
    frame = table.to_pandas()
    frame = frame[frame.kind == "gradient"].sort_values("start_ns", kind="stable")
    frame["tensor"] = [int(ids[0]) for ids in frame.tensors]
    frame["lane"] = frame.lane.astype(str)  # not what other lanes there are
    return frame.reset_index(drop=True)


@needs_compiler
def test_the_job_and_the_record_are_as_with_functions_of_python(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "hooked.py")]

    def record(native: str) -> Done:
        command = traced(tmp_path / native, job)
        return run(command, cwd=tmp_path, **ONE_RANK, DDLTRACE_NATIVE=native)

    plain, python, native = at_once(
        lambda: run(job, cwd=tmp_path, **ONE_RANK), lambda: record("0"), lambda: record("1")
    )
    assert plain.status == 0, plain.stderr
    assert plain.stdout.count("before") == 12
    assert plain.stdout.count("after") == 6
    assert (native.status, native.stdout) == (0, plain.stdout), native.stderr
    # What the last line counts are our own functions.
    assert python.status == 0, python.stderr
    assert python.stdout.splitlines()[:-1] == plain.stdout.splitlines()[:-1]
    found = {native: gradients(tmp_path / native) for native in ("0", "1")}
    same = ["name", "tensor", "step", "phase", "lane"]
    assert_frame_equal(found["1"][same], found["0"][same])
    assert len(found["1"]) > 200
    assert (found["1"].start_ns == found["1"].end_ns).all()


@pytest.mark.long
@needs_compiler
def test_compiled_autograd_goes_without(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "hooked.py"), "compiled"]
    plain, done = at_once(
        lambda: run(job, cwd=tmp_path, **ONE_RANK),
        lambda: run(traced(tmp_path / "trace", job), cwd=tmp_path, **ONE_RANK),
    )
    assert plain.status == 0, plain.stderr
    assert (done.status, done.stdout) == (0, plain.stdout), done.stderr
    assert set(gradients(tmp_path / "trace").step) >= {0}


@needs_compiler
def test_what_has_no_room_is_counted(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", FULL], cwd=tmp_path)
    assert done.status == 0, done.stderr
