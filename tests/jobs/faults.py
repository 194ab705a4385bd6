"""Breaks the tracer's own functions one after the other and trains under each broken tracer.

`faults.py OUTPUT [PART]` prints one JSON line per case: the function that was made to raise,
how often it was reached, the exit status, the losses, and what the trace says of the fault.
Cases run in forked children, which spares them the imports. The first case is untraced, the
second traced and unbroken.
"""

import atexit
import functools
import importlib
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # with the next one: what the job would load lazily, in every child
import torch.distributed as dist
import torch.distributed.tensor.parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddltrace
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.inject import arm

PACKAGE = "ddltrace.tracer."
MODULES = [
    "recorder",
    "registry",
    "reaper",
    "session",
    "steps",
    "store",
    "watchdog",
    "writer",
    *(
        f"interpose.{path.stem}"
        for path in sorted(
            (Path(ddltrace.__file__).parent.parent / "tracer/interpose").glob("*.py")
        )
        if path.stem != "__init__"
    ),
]


# They read or set one attribute: there is nothing in them that can fail.
TRIVIAL = ("session:current_session", "interpose.ddp:_InitialBuckets")


class InjectedError(Exception):
    """What the broken functions raise."""


def train(losses):
    torch.manual_seed(3)
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
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
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(2, 6)).sum().item().hex())
    dist.destroy_process_group()


def points():
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
                    if inspect.isfunction(function) or isinstance(function, property)
                ]
            else:
                continue
            yield from (point for point in found if not point.startswith(TRIVIAL))


def break_function(point, after, reached):
    """Makes a function raise from its call number `after` on."""
    module_name, _, path = point.partition(":")
    owner = importlib.import_module(PACKAGE + module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    is_property = isinstance(original, property)
    function = original.fget if is_property else original

    @functools.wraps(function)
    def broken(*args, **kwargs):
        reached[0] += 1
        if reached[0] > after:
            raise InjectedError(point)
        return function(*args, **kwargs)

    setattr(owner, name, property(broken) if is_property else broken)
    # Modules that imported the function by its name hold it, too.
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(PACKAGE) and not classes:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, broken)


def case(point, after, trace):
    """One training in a child."""
    result, began = tempfile.mktemp(), time.monotonic()
    child = os.fork()
    if child == 0:
        reached, losses = [0], []
        if trace is not None:
            arm(CaptureConfig(directory=trace, flush_interval_s=0.02))
        if point is not None:
            break_function(point, after, reached)
        exit_status = 3
        try:
            train(losses)
        except BaseException:  # noqa: BLE001 - its status is the result
            traceback.print_exc()
            exit_status = 1
        # As at the end of a process, without taking a thousand modules apart.
        atexit._run_exitfuncs()
        Path(result).write_text(json.dumps([losses, reached[0]]))
        os._exit(exit_status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    losses, reached = json.loads(Path(result).read_text())
    told = ""
    if trace is not None:
        told = "".join(path.read_text() for path in trace.iterdir() if path.suffix != ".arrows")
    line = {
        "point": point,
        "after": after,
        "status": status,
        "reached": reached,
        "losses": losses,
        "seconds": round(time.monotonic() - began, 2),
        "told": "InjectedError" in told,
        "errors": told.count("InjectedError"),
    }
    print(json.dumps(line), flush=True)


def main():
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    part, parts = map(int, sys.argv[2].split("/")) if len(sys.argv) > 2 else (0, 1)
    cases = [(None, 0)]
    cases += [(p, after) for n, p in enumerate(points()) for after in (0, 5) if n % parts == part]
    case(None, 0, None)
    for number, (point, after) in enumerate(cases):
        trace = output / str(number)
        trace.mkdir(parents=True)
        case(point, after, trace)


if __name__ == "__main__":
    main()
