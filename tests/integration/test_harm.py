"""The tracer never harms the job, and what it recorded outlives any death of it.

Jobs here run on one rank each, in forked children of one process that has imported PyTorch
once: that makes hundreds of deaths affordable. `DDLTRACE_KILLS=100` kills as many ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from support.jobs import (
    DDLTRACE,
    JOBS,
    ONE_RANK,
    at_once,
    on_ranks,
    run,
    torchrun,
    traced,
    without_native_logs,
)
from support.sampling import all_cases, choose_seed, sampled
from support.traces import read_last_rows

from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RunInfo
from ddltrace.tracer.trace.run_reader import read_run

NUM_FAULTS = 60
KILLS = int(os.environ.get("DDLTRACE_KILLS", "10"))
WAYS = sampled(
    [
        *("returns", "sys_exit", "raises", "exit_in_thread", "raises_in_thread", "pending"),
        *("pending_kept", "destroyed", "at_exit", "os_exit", "abort", "segfault", "sigterm"),
        *("sigterm_handled", "sigint", "handler_communicates", "out_of_memory"),
        *("out_of_memory_unwritten", "forks", "environment", "vanished"),
    ],
    7,
)
# These leave without the interpreter's end: the trace cannot be closed.
CUT_SHORT = {"os_exit", "abort", "segfault", "sigterm", "sigint"}


def lines(command: list[str], cwd: Path, timeout: float = 280) -> list[dict[str, Any]]:
    done = run(command, cwd=cwd, timeout=timeout)
    assert done.status == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_every_way_to_end_ends_as_untraced(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "exits.py")]
    traces = tmp_path / "traces"
    traces.mkdir()
    plain, done = at_once(
        lambda: lines([*job, *WAYS], tmp_path),
        lambda: lines([*job, "traced", str(traces), *WAYS], tmp_path),
    )
    assert [d["how"] for d in done] == list(WAYS)
    # Statuses and, to the byte, what was printed: tracebacks, warnings, signal handlers,
    # sys.path, the random numbers that follow.
    assert done == plain
    for number, how in enumerate(WAYS):
        trace = traces / f"{number}-{how}"
        if how == "vanished":
            trace = trace.with_name(trace.name + ".gone")
        for info in read_run(trace).ranks:
            table, lost = read_last_rows(trace, info.segment)
            # Only a death in the middle of a write cuts a batch.
            assert lost == 0 or info.status == "killed", how
            if how not in CUT_SHORT | {"vanished"}:
                assert info.status == "complete", how
                assert "all_reduce" in set(table["op"].to_pylist()), how
                assert info.errors == [], how


def test_no_thread_of_the_tracer_evaluates_strings(tmp_path: Path) -> None:
    # CPython forgets a KeyboardInterrupt that ends the interpreter if another thread evaluates a
    # string meanwhile: the process then exits with status 1 instead of ending by SIGINT.
    command = on_ranks("string_evaluations.py", ranks=1)
    done = run(traced(tmp_path / "trace", command), cwd=tmp_path)
    assert done.status == 0, done.stderr
    printed = json.loads(done.stdout)
    assert {"ddltrace-counters", "ddltrace-writer"} < set(printed["threads"])
    assert printed["evaluated"] == []


@pytest.mark.long
def test_threads_of_gloo_let_go_before_the_interpreter_ends(tmp_path: Path) -> None:
    # Without the guard CPython 3.11 aborts: the thread asks for the interpreter lock of an
    # interpreter that ends.
    command = on_ranks("callback_at_exit.py")
    done = run(traced(tmp_path / "trace", command), cwd=tmp_path)
    assert done.status == 0, done.stderr


def test_killed_ranks_lose_only_what_was_not_written(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "killed.py"), str(tmp_path), str(KILLS), "7"]
    deaths = lines(job, tmp_path, timeout=60 + 15 * KILLS)
    assert len(deaths) == KILLS
    # Where nothing was written yet, nothing is sure.
    lost_ms = [death["lost_ms"] for death in deaths if death["lost_ms"] is not None]
    assert max(lost_ms) < 1000, lost_ms
    for death in deaths:
        trace = tmp_path / str(death["number"])
        for reading in ("as it lies", "finalized"):
            run_info = read_run(trace)
            if reading == "finalized":
                run_info = finalize(trace, run_info)
                assert run_info.ranks[0].status == "killed"
            (info,) = run_info.ranks
            table, _ = read_last_rows(trace, info.segment)
            table.validate(full=True)
            updates = table["name"].to_pylist().count("optimizer")
            assert death["sure"] <= updates <= death["steps"] + 1, (death, reading)


@pytest.mark.long
@pytest.mark.timeout(3600 if all_cases() else 300)
def test_a_fault_in_the_tracer_never_reaches_the_job(tmp_path: Path) -> None:
    """Breaks a sample of the tracer's functions; all of them under ``dev.py test --all``."""
    sample = [] if all_cases() else [str(NUM_FAULTS), str(choose_seed())]
    command = [sys.executable, str(JOBS / "faults.py"), str(tmp_path), *sample]
    cases = lines(command, tmp_path, timeout=3600)
    kinds = len({case["job"] for case in cases})
    untraced = {case["job"]: case for case in cases[:kinds]}
    for case in untraced.values():
        assert case["statuses"] == [3, 3]
        assert all(len(losses) >= 7 for losses in case["losses"])
    for case in cases[kinds : 2 * kinds]:
        assert (case["point"], case["errors"]) == (None, 0)
    for case in cases[kinds:]:
        plain = untraced[case["job"]]
        for what in ("statuses", "losses", "printed"):
            assert case[what] == plain[what], case
    broken = cases[2 * kinds :]
    reached = [case for case in broken if case["reached"] > case["after"]]
    assert len(reached) > 10
    reported = [case for case in reached if case["reported"]]
    # A sample may hold more than its share of the functions whose fault leaves no report.
    least = 0.7 if all_cases() else 0.5
    assert len(reported) > least * len(reached), [c["point"] for c in reached if not c["reported"]]


@pytest.mark.long
def test_a_writer_that_gets_no_time_costs_events_all_counted(tmp_path: Path) -> None:
    """The job's thread keeps the interpreter to itself; then it is killed."""
    code = """
import os, signal, sys, time
import torch, torch.distributed as dist
import ddltrace
dist.init_process_group("gloo")
sys.setswitchinterval(1000)
for number in range(300_000):
    with ddltrace.annotate("region"):
        pass
print("done", flush=True)
sys.setswitchinterval(0.005)
if sys.argv[1] == "killed":
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    for how, status in (("returns", 0), ("killed", 137)):
        trace = tmp_path / how
        job = [sys.executable, "-c", code, how]
        done = run(traced(trace, job), cwd=tmp_path, **ONE_RANK)
        assert (done.status, done.stdout) == (status, "done\n"), done.stderr
        (info,) = read_run(trace).ranks
        table, lost = read_last_rows(trace, info.segment)
        regions = table["name"].to_pylist().count("region")
        assert (lost, regions + info.dropped) == (0, 300_000)
        # The buffer holds a third of them.
        assert info.dropped > 190_000
        line = f"rank 0: {info.dropped:,} events dropped: buffer or disk full"
        report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
        assert report.status == 0, report.stderr
        assert (done.stderr.count(line), report.stdout.count(line)) == (1, 1)


@pytest.mark.long
def test_forks_in_the_middle_of_writes(tmp_path: Path) -> None:
    """Children that train on neither reach the trace nor keep events that no writer will write."""
    trace = tmp_path / "trace"
    trace.mkdir()
    write_run(trace, RunInfo())
    code = """
import os, pathlib, sys
import torch, torch.distributed as dist
import torch._dynamo  # what optimizers would load lazily, in every child
import ddltrace
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.capture.inject import arm
from ddltrace.tracer.capture.session import current_session
arm(CaptureConfig(directory=pathlib.Path(sys.argv[1]), flush_interval_s=0.01))
dist.init_process_group("gloo")
recorder = current_session().recorder
def train(name, steps):
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
for number in range(100):
    for region in range(500):
        with ddltrace.annotate("region"):
            pass
    child = os.fork()
    if child == 0:
        train("childs", 500 if number == 0 else 2)
        kept = (recorder.flat, recorder.waits, recorder.phase_changes, recorder.step_changes)
        os._exit(any(kept))
    assert os.waitpid(child, 0)[1] == 0
train("parents", 2)
"""
    job = [sys.executable, "-c", code, str(trace)]
    done = run(job, cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stderr) == (0, "")
    run_info = read_run(trace)
    assert (run_info.status, run_info.notes) == ("complete", [])
    (info,) = run_info.ranks
    assert {tensor.name for tensor in info.tensors} == {"parents.weight", "parents.bias"}
    table, lost = read_last_rows(trace, info.segment)
    table.validate(full=True)
    names = table["name"].to_pylist()
    assert (lost, names.count("region"), names.count("optimizer")) == (0, 50_000, 2)


def test_a_large_trace_is_finished_in_bounded_memory(tmp_path: Path) -> None:
    """`DDLTRACE_TRACE_GB=2.1` writes as much."""
    gigabytes = os.environ.get("DDLTRACE_TRACE_GB", "0.05")
    job = [sys.executable, str(JOBS / "large.py"), str(tmp_path), gigabytes]
    (done,) = lines(job, tmp_path, timeout=100 + 400 * float(gigabytes))
    assert (done["status"], done["notes"]) == ("complete", [])
    assert done["read"] == done["rows"] > 0


@pytest.mark.long
def test_nothing_is_kept_alive_and_memory_stays(tmp_path: Path) -> None:
    """`DDLTRACE_STEPS=10000` trains as long."""
    steps = int(os.environ.get("DDLTRACE_STEPS", "600"))
    job = [sys.executable, str(JOBS / "long.py"), str(steps)]
    timeout = 200 + 0.2 * steps
    # What is measured of the cost would leave out some steps, and with them their messages.
    recorder = traced(tmp_path / "trace", job)
    done = run(recorder, cwd=tmp_path, timeout=timeout)
    assert done.status == 0, done.stderr
    memory = [int(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("memory")]
    assert "tensors alive 0" in done.stdout
    assert "modules alive 0" in done.stdout
    half = memory[len(memory) // 2]
    assert memory[-1] - half < 4096 + steps, "kilobytes of growth over half of the steps"
    run_info = read_run(tmp_path / "trace")
    assert run_info.status == "complete"
    for info in run_info.ranks:
        assert info.errors == []
        # Each of the copies takes the former one's place.
        assert [t.name for t in info.tensors].count("0.weight") == 1
        assert len(info.tensors) == 8 + 8 + 2
        table, _ = read_last_rows(tmp_path / "trace", info.segment)
        messages = table.filter(pc.equal(table["op"], "send"))
        # A message that was open when it was written first has two rows.
        assert len(pc.unique(messages["id"])) == steps


@pytest.mark.long
@pytest.mark.parametrize("native", sampled(["1", "0"], 1))
def test_parameters_can_be_swapped(tmp_path: Path, native: str) -> None:
    """PyTorch swaps no tensor that has other references, even weak ones."""
    (tmp_path / "train.py").write_text(SWAPS)
    command = on_ranks(tmp_path / "train.py")
    untraced = run(command, cwd=tmp_path)
    done = run(traced(tmp_path / "trace", command), cwd=tmp_path, DDLTRACE_NATIVE=native)
    assert (done.status, untraced.status) == (0, 0), done.stderr
    assert done.losses() == untraced.losses()
    for info in read_run(tmp_path / "trace").ranks:
        assert info.errors == []
        events = read_last_rows(tmp_path / "trace", info.segment)[0].to_pandas()
        names = events[events.kind == "gradient"].name.astype(str).value_counts()
        # Once in each of six steps, before the swap, after it, and after the one that failed.
        swapped = {"weight": 6, "bias": 6, "weight#2": 6, "bias#2": 6}
        assert dict(names) == swapped | {"0.weight": 4, "1.weight": 4}


SWAPS = """
import torch, torch.distributed as dist, weakref
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.__future__.set_swap_module_params_on_conversion(True)
parallel = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())
def train(model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} loss {loss.item().hex()}\\n", end="")
for model in (nn.Linear(4, 2), parallel):
    train(model, torch.float32)
    model.zero_grad()
    model.to(torch.float64)
    train(model, torch.float64)
    held = weakref.ref(next(model.parameters()))
    try:
        model.to(torch.float32)
    except RuntimeError as error:
        pass
    else:
        raise AssertionError("swapped in spite of the job's own reference")
    train(model, torch.float64)
pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
train(pair, torch.float32)
pair.zero_grad()
torch.utils.swap_tensors(pair[0].weight, pair[1].weight)
train(pair, torch.float32)
"""


@pytest.mark.parametrize("native", sampled(["1", "0"], 1))
def test_nobody_else_waits_for_what_writes_when_it_is_waited_for(
    tmp_path: Path, native: str
) -> None:
    """On Gloo each wait for a reduce-scatter writes its output, which may be the job's by then."""
    (tmp_path / "job.py").write_text(WRITES_WHEN_WAITED_FOR)
    command = traced(tmp_path / "trace", on_ranks(tmp_path / "job.py"))
    done = run(command, cwd=tmp_path, DDLTRACE_NATIVE=native)
    assert done.status == 0, done.stderr
    for info in read_run(tmp_path / "trace").ranks:
        assert info.errors == []
        events = read_last_rows(tmp_path / "trace", info.segment)[0].to_pandas()
        found = events[events.op == "reduce_scatter"]
        assert len(found) == 3 * 60
        assert set(found.status) == {"ok"}
        waits = events[events.kind == "wait"].set_index("parent").end_ns
        assert (found.end_ns.to_numpy() <= waits[found.id].to_numpy()).all()


WRITES_WHEN_WAITED_FOR = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.group.WORLD
changed = 0
for _ in range(60):
    output, parts = torch.zeros(4), [torch.ones(4), torch.ones(4)]
    for launch in (
        lambda: dist.reduce_scatter_tensor(output, torch.cat(parts), async_op=True),
        lambda: dist.reduce_scatter(output, parts, async_op=True),
        lambda: group.reduce_scatter_tensor_coalesced([output], [torch.cat(parts)]),
    ):
        launch().wait()
        assert (output == 2).all()
        output.fill_(7)
        parts = [torch.ones(4), torch.ones(4)]
        time.sleep(0.0002)
        changed += int((output != 7).any())
assert changed == 0, f"{changed} outputs were written once more"
"""


def test_a_job_that_sends_nothing_hangs_nowhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAKE)
    done = run(traced(tmp_path / "trace", [sys.executable, "train.py"]), cwd=tmp_path)
    assert done.status == 0, done.stderr
    (info,) = read_run(tmp_path / "trace").ranks
    assert info.errors == []
    events = read_last_rows(tmp_path / "trace", info.segment)[0].to_pandas()
    found = events[events.kind == "message"]
    assert list(found.op) == ["all_reduce", "all_reduce", "barrier", "send"]
    assert set(found.status) == {"ok"}


FAKE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
tensor = torch.ones(4)
dist.all_reduce(tensor)
work = dist.all_reduce(tensor, async_op=True)
dist.barrier()
dist.send(tensor, 3)
"""


def test_threads_that_join_at_once_are_one_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AT_ONCE)
    done = run([sys.executable, "train.py"], cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (0, "1\n"), done.stderr


AT_ONCE = """
import threading
from pathlib import Path
import torch, torch.distributed as dist
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.capture.session import current_session, start_session
dist.init_process_group("gloo")
together = threading.Barrier(3)
def start():
    together.wait()
    start_session(CaptureConfig(directory=Path("trace")))
threads = [threading.Thread(target=start) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(list(Path("trace").glob("rank-*.arrows"))))
current_session().close()
"""


@pytest.mark.long
@pytest.mark.parametrize("native", sampled(["1", "0"], 1))
def test_a_thread_may_communicate_while_another_trains(tmp_path: Path, native: str) -> None:
    """Who looks at a gradient while another thread sets it ends in a segmentation fault."""
    (tmp_path / "train.py").write_text(BESIDE)
    job = traced(tmp_path / "trace", on_ranks(tmp_path / "train.py"))
    done = run(job, cwd=tmp_path, DDLTRACE_NATIVE=native)
    assert done.status == 0, done.stderr
    for info in read_run(tmp_path / "trace").ranks:
        assert (info.errors, info.dropped) == ([], 0)
        events = read_last_rows(tmp_path / "trace", info.segment)[0].to_pandas()
        reduced = events[(events.kind == "message") & (events.op == "all_reduce")]
        assert reduced.id.nunique() == NUM_BESIDE


NUM_BESIDE = 4000 if all_cases() else 1500
BESIDE = f"""
import threading
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def communicate():
    for _ in range({NUM_BESIDE}):
        dist.all_reduce(torch.ones(10))
beside = threading.Thread(target=communicate)
beside.start()
while beside.is_alive():
    optimizer.zero_grad()
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
beside.join()
dist.destroy_process_group()
"""


def test_a_step_that_raises_does_not_hide_the_next_ones(tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
class Nested(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
weight = torch.nn.Parameter(torch.ones(3))
plain = torch.optim.SGD([weight], lr=0.1)
def fail():
    raise ValueError("of the job's own")
for optimizer in (plain, Nested([weight], lr=0.1)):
    for step in range(4):
        weight.sum().backward()
        try:
            optimizer.step(fail if step == 1 else None)
        except ValueError as error:
            print(error)
"""
    job = [sys.executable, "-c", code]
    done = run(traced(tmp_path / "trace", job), cwd=tmp_path, **ONE_RANK)
    assert (done.status, done.stdout) == (0, 2 * "of the job's own\n"), done.stderr
    (info,) = read_run(tmp_path / "trace").ranks
    assert info.errors == []
    table, _ = read_last_rows(tmp_path / "trace", info.segment)
    assert table["kind"].to_pylist().count("step") == 6
    assert table["name"].to_pylist().count("optimizer") == 6


@pytest.mark.long
@pytest.mark.parametrize("level", ["layer", "op"])
def test_the_device_is_never_asked_for(tmp_path: Path, level: str) -> None:
    """The answer would initialize the driver, and children forked later could not use it."""
    code = """
import torch, torch.distributed as dist
def asked(*args): print("asked")
torch.cuda.is_available = torch.cuda.device_count = asked
torch.cuda.init = torch.cuda._lazy_init = asked
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(15):
    model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
print("done")
"""
    job = [sys.executable, "-c", code]
    command = traced(tmp_path / "trace", job, "--level", level)
    plain, done = at_once(
        lambda: run(job, cwd=tmp_path, **ONE_RANK), lambda: run(command, cwd=tmp_path, **ONE_RANK)
    )
    # PyTorch's own optimizers may ask.
    assert (done.status, done.stdout) == (0, plain.stdout), done.stderr
    (info,) = read_run(tmp_path / "trace").ranks
    assert (info.device, info.errors) == ("cpu", [])


@pytest.mark.long
def test_the_output_of_a_job_is_its_own_to_the_byte(tmp_path: Path) -> None:
    """Of two ranks under torchrun, sorted, since ranks print in any order."""
    command = torchrun("ddp_cnn.py", "3")
    plain, done = at_once(
        lambda: run(command, cwd=tmp_path, PYTHONWARNINGS="always"),
        lambda: run(traced(tmp_path / "trace", command), cwd=tmp_path, PYTHONWARNINGS="always"),
    )
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    ours = [line for line in done.stderr.splitlines() if line.startswith("ddltrace: ")]
    others = [line for line in done.stderr.splitlines() if line not in ours]
    assert len(ours) == 2
    assert without_native_logs(others) == without_native_logs(plain.stderr.splitlines())
