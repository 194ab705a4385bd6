"""Breaks the tracer's own functions one after the other and trains under each broken tracer.

`faults.py OUTPUT [COUNT SEED]` prints one JSON line per case: the job, the function that was made
to raise, how often it was reached, the exit status, the losses, what was printed, and what the
trace says of the fault. With COUNT, it runs that many cases, drawn with SEED, instead of all.
Cases run in forked children, which spares them the imports. Each job runs untraced first, then
traced and unbroken.
"""

import atexit
import functools
import importlib
import inspect
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import FunctionType

# As the launcher sets it: the profiler's library would print.
os.environ["KINETO_LOG_LEVEL"] = "99"

import torch
import torch._dynamo  # with the next one: what the job would load lazily, in every child
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed import rpc
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddltrace
import ddltrace.tracer
from ddltrace.tracer.capture import overhead_probe
from ddltrace.tracer.capture.inject import arm
from ddltrace.tracer.config import CaptureConfig

PACKAGE = "ddltrace.tracer."
TRACER = Path(ddltrace.tracer.__file__).resolve().parent
MODULES = [
    "trace.arrow_arrays",
    "record.batches",
    "timing.clock_exchange",
    "timing.clocks",
    "timing.device_use",
    "config",
    "interpose.c10d.gloo_times",
    "naming.gradient_access",
    "naming.gradient_ready_times",
    "naming.ready_gradients",
    "interpose.c10d.known_messages",
    "native.library",
    "record.recorder",
    "naming.registry",
    "interpose.c10d.reaper",
    "capture.overhead_probe",
    "capture.session",
    "record.step_tracker",
    "trace.json_files",
    "trace.liveness",
    "trace.run_files",
    "trace.run_info",
    "trace.stream_writer",
    "trace.trace_files",
    "record.rank_record",
    "record.watchdog",
    "record.writer",
    *(
        ".".join(path.with_suffix("").relative_to(TRACER).parts)
        for path in sorted((TRACER / "interpose").rglob("*.py"))
        if path.stem not in {"__init__", "gloo_times", "import_hooks", "known_messages", "reaper"}
    ),
]


LEFT_OUT = (
    # They read or set one attribute: there is nothing in them that can fail.
    *("capture.session:current_session", "interpose.ddp:_InitialBuckets"),
    # They call PyTorch, and set one attribute before.
    *(
        "interpose.c10d.observer:Observer.collecting",
        "interpose.c10d.python_launches:Offering.passing_by",
    ),
    # They are what catches the faults of others.
    "interpose.c10d.functional:_Pending._waited",
    *(
        "capture.session:Session.fault",
        "interpose.patch_context:PatchContext.carrying",
        "config:CaptureConfig.report_failure",
    ),
    *(
        "record.writer:WriterThread.run",
        "interpose.c10d.reaper:_GroupReapers._run",
        "timing.clock_exchange:ClockServer.run",
    ),
    *("timing.clock_exchange:ClockClient.run", "interpose.operators:OperatorWindow._fold"),
    "interpose.c10d.waits:Waits._follows",
    # Of the launcher, or of a process that records without one.
    *("config:CaptureConfig.in_code", "config:CaptureConfig.to_environment"),
)


class InjectedError(Exception):
    """What the broken functions raise."""


def train(losses):
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
    for (batch,) in DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        with ddltrace.annotate("step"):
            loss = model(batch).square().mean()
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        optimizer.step()
        losses.append(total.item().hex())
    dist.broadcast(torch.ones(5), src=0)
    dist.barrier()
    dist.monitored_barrier()
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(2, 6)).sum().item().hex())
    child = os.fork()
    if child == 0:
        model.train()
        model.module(torch.ones(2, 6)).sum().backward()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    communicate(losses)


def communicate(losses):
    """What a training like ours does not do."""
    other = 1 - dist.get_rank()
    received = torch.zeros(4)
    work = dist.irecv(received, other, tag=2)
    dist.send(torch.full((4,), 3.0), other, tag=2)
    work.wait()
    requests = [dist.P2POp(dist.isend, torch.ones(4), other)]
    requests.append(dist.P2POp(dist.irecv, received, other))
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    summed = functional.all_reduce(received, "sum", dist.group.WORLD)
    work = dist.all_reduce(received, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    then = dist.all_reduce(received, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    losses += [summed.sum().item().hex(), then.wait().sum().item().hex()]
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 3)).sum().backward()
    losses.append(model.module.weight.grad.sum().item().hex())


def hook(_, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0] / 2)


def shard(losses):
    """Fully sharded data parallelism."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())


def call(losses):
    """Remote calls."""
    rank = dist.get_rank()
    other = f"worker{1 - rank}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path.cwd() / 'rpc'}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    for number in range(7):
        losses.append(rpc.rpc_sync(other, torch.add, (torch.ones(2), number)).sum().item().hex())
    reference = rpc.remote(other, torch.add, (torch.ones(2), 5))
    losses.append(reference.to_here().sum().item().hex())
    losses.append(rpc.rpc_async(other, max, ([1, 9],)).wait())
    rpc.shutdown()


class Ticket(dist.Work):
    """A handle in Python."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def wait(self, timeout=None):
        return self.inner.wait()

    def is_completed(self):
        return self.inner.is_completed()

    def get_future(self):
        return self.inner.get_future()


def send_by_own(losses):
    """Messages of a process group that is written in Python."""

    class Own(dist.ProcessGroup):
        def __init__(self, store, rank):
            super().__init__(rank, 2)
            self.inner = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

        def allreduce(self, tensors, opts=None):
            return Ticket(self.inner.allreduce(tensors, opts or dist.AllreduceOptions()))

        def broadcast(self, tensors, opts):
            return self.inner.broadcast(tensors, opts)

        def allgather(self, outputs, tensors, opts):
            return self.inner.allgather(outputs, tensors, opts)

        def send(self, tensors, rank, tag):
            return self.inner.send(tensors, rank, tag)

        def recv(self, tensors, rank, tag):
            return self.inner.recv(tensors, rank, tag)

    store = dist.distributed_c10d._get_default_store()
    group = Own(dist.PrefixStore("own", store), dist.get_rank())
    for number in range(7):
        tensor = torch.full((3,), number + dist.get_rank() + 1.0)
        group.allreduce([tensor]).wait()
        work = group.allreduce([tensor], opts=dist.AllreduceOptions())
        while not work.is_completed():
            time.sleep(0.001)
        group.allreduce([tensor]).get_future().wait()
        if dist.get_rank():
            group.send([tensor], 0, 3).wait()
        else:
            group.recv([tensor], 1, 3).wait()
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        losses.append(tensor.sum().item().hex())
    model = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    model(torch.ones(1, 3)).sum().backward()
    losses.append(model.module.weight.grad.sum().item().hex())


JOBS = {"train": train, "shard": shard, "call": call, "own": send_by_own}


def job_of(point):
    """The job that comes through a function."""
    jobs = {
        "interpose.fsdp": "shard",
        "interpose.rpc": "call",
        "interpose.c10d.python_groups": "own",
    }
    return jobs.get(point.split(":")[0], "train")


def points():
    """The functions and methods to break, one after the other."""
    every = list(functions())
    for name in LEFT_OUT:
        assert any(point.startswith(name) for point in every), f"there is no {name}"
    return [point for point in every if not point.startswith(LEFT_OUT)]


def functions():
    """Every function and method of the tracer's modules that run inside a job."""
    for name in MODULES:
        module = importlib.import_module(PACKAGE + name)
        for attribute, value in sorted(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                found = [f"{name}:{attribute}"]
            elif inspect.isclass(value):
                found = [
                    f"{name}:{attribute}.{method}"
                    for method, function in sorted(vars(value).items())
                    if isinstance(function, (FunctionType, property, staticmethod, classmethod))
                    if not method.startswith("__") or method in ("__init__", "__call__")
                ]
            else:
                continue
            yield from found


def break_function(point, after, reached):
    """Makes a function raise from its call number `after` on."""
    module_name, _, path = point.partition(":")
    owner = importlib.import_module(PACKAGE + module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    if isinstance(original, property):
        function, wrap = original.fget, lambda broken: property(broken, original.fset)
    elif isinstance(original, (staticmethod, classmethod)):
        function, wrap = original.__func__, type(original)
    else:
        function, wrap = original, lambda broken: broken

    @functools.wraps(function)
    def broken(*args, **kwargs):
        reached[0] += 1
        if reached[0] > after:
            raise InjectedError(point)
        return function(*args, **kwargs)

    setattr(owner, name, wrap(broken))
    # Modules that imported the function by its name hold it, too.
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(PACKAGE) and not classes:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, broken)


def configuration(point, trace):
    """How to record, so that the point is come through."""
    module = (point or "").partition(":")[0]
    extra = {}
    if module == "interpose.operators":
        extra = {"level": "op", "op_steps": (2, 4)}
    if module == "self_measure":
        overhead_probe.FIRST_STEP = 1
        extra = {"measure_cost": 4}
    return CaptureConfig(directory=trace, flush_interval_s=0.02, **extra)


def be_a_rank(rank, job, point, after, trace):
    """Runs a job in this process and leaves its losses in a file."""
    output = os.open(f"output-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    reached, losses = [0], []
    if trace is not None:
        arm(configuration(point, trace))
    if point is not None:
        break_function(point, after, reached)
    exit_status = 3
    try:
        torch.manual_seed(3)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path.cwd() / 'store'}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        JOBS[job](losses)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - its status is the result
        traceback.print_exc()
        exit_status = 1
    # As at the end of a process, without taking a thousand modules apart.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    Path(f"result-{rank}").write_text(json.dumps([losses, reached[0]]))
    os._exit(exit_status)


def case(job, point, after, trace):
    """One run of a job by two ranks."""
    began = time.monotonic()
    scratch = tempfile.mkdtemp()
    os.chdir(scratch)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            be_a_rank(rank, job, point, after, trace)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    results = [json.loads(Path(f"result-{rank}").read_text()) for rank in range(2)]
    printed = "".join(Path(f"output-{rank}").read_text() for rank in range(2))
    os.chdir("/")
    shutil.rmtree(scratch)
    reported = ""
    if trace is not None:
        reported = "".join(p.read_text() for p in trace.iterdir() if p.suffix in (".json", ".txt"))
    line = {
        "job": job,
        "point": point,
        "after": after,
        "statuses": statuses,
        "reached": max(reached for _, reached in results),
        "losses": [losses for losses, _ in results],
        "printed": printed[-2000:],
        "seconds": round(time.monotonic() - began, 2),
        "reported": "InjectedError" in reported,
        "errors": reported.count("InjectedError"),
    }
    print(json.dumps(line), flush=True)


def main():
    torch.set_num_threads(1)
    output = Path(sys.argv[1]).absolute()
    # Each function fails at once, and from its sixth call on.
    cases = [(job_of(point), point, after) for point in points() for after in (0, 5)]
    if len(sys.argv) > 2:
        cases = random.Random(sys.argv[3]).sample(cases, int(sys.argv[2]))
    for job in JOBS:
        case(job, None, 0, None)
    for number, each in enumerate([*((job, None, 0) for job in JOBS), *cases]):
        trace = output / str(number)
        trace.mkdir(parents=True)
        case(*each, trace)


if __name__ == "__main__":
    main()
