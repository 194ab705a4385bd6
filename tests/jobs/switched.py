"""A job that trains in one of several ways, and switches its own recording if it is told to.

Arguments: the way; then steps at which recording is switched on and off in turn, or none. With
``until PATH``, it trains until a file exists, and makes the file ``trains`` beside it. Prints the
losses of rank 0, and how many functions of the tracer were called while nothing was recorded.
"""

from __future__ import annotations

import collections
import json
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddltrace.tracer
from ddltrace.tracer.capture.recording_switch import Change
from ddltrace.tracer.capture.session import current_session

OWN = str(Path(ddltrace.tracer.__file__).resolve().parent)
STEPS = 20


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()),
        *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
    )


def mean_of(_: object, bucket: Any) -> Any:
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


mean_of.__annotations__.clear()  # PyTorch accepts none, or its own types, not their names


def trainers(way: str) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Models and their optimizers; one of them updates in each step."""
    models: list[Any] = [network()]
    if way == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (0, 3, 5):
            fully_shard(models[0][layer], mesh=mesh)
        fully_shard(models[0], mesh=mesh)
    else:
        count = 2 if way == "two models" else 1
        models = [DistributedDataParallel(network()) for _ in range(count)]
    if way == "communication hook":
        models[0].register_comm_hook(None, mean_of)
    if way == "gradient hooks":
        for parameter in models[0].parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    if way == "compiled":
        models = [torch.compile(model) for model in models]
    return [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]


def messages() -> None:
    """Messages of each kind that has patches of its own."""
    from torch.distributed import _functional_collectives as functional

    dist.all_reduce(torch.ones(3), async_op=True).wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum().item()
    rank = dist.get_rank()
    (dist.send if rank == 0 else dist.recv)(torch.ones(4), 1 - rank)


def main() -> None:
    way, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    session = current_session()
    switches = [] if rest[:1] == ["until"] else [int(text) for text in rest]
    until = Path(rest[1]) if rest[:1] == ["until"] else None
    data, target = torch.randn(8, 16), torch.randint(0, 4, (8,))
    called: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and str(Path(frame.f_code.co_filename).resolve()).startswith(OWN):
            called[frame.f_code.co_name] += 1

    of_steps, losses, step = trainers(way), [], 0
    while step < STEPS or until is not None:
        if step + 2 in switches and session is not None and session._control is not None:
            level = None if switches.index(step + 2) % 2 else "layer"
            session._control.switch.plan([Change(step + 2, level)])
        is_off = session is None or session.recorder.off
        if is_off and way == "ddp" and until is None:
            sys.setprofile(note)
        model, optimizer = of_steps[step % len(of_steps)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        if way == "ddp" and until is None:
            messages()
        optimizer.step()
        sys.setprofile(None)
        losses.append(loss.item())
        step += 1
        if until is not None:
            over = torch.tensor(float(until.exists()))
            dist.all_reduce(over)
            if over:
                break
            time.sleep(0.005)
            if step == 3:
                (until.parent / "trains").touch()
    if dist.get_rank() == 0:
        sys.stdout.write(f"losses {losses[-1]!r} {sum(losses)!r} steps {step}\n")
    sys.stdout.write(f"called {json.dumps(called)}\n")
    dist.destroy_process_group()


main()
