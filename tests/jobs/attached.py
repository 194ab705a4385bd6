"""A job that knows nothing of ddltrace and trains until it is told to stop.

Arguments: a folder; then the number of steps, if it is not to train until the file ``stop`` is in
the folder. On SIGUSR1, a rank runs the script that ``script-PID`` of the folder names, on the main
thread between two instructions, as ``sys.remote_exec`` has it do. With the file ``wait`` in the
folder, the ranks join no process group before that file is gone; with ``block``, rank 1 keeps
rank 0 waiting in a collective until that file is gone. Prints the losses of rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else None


def run_script(*_: object) -> None:
    script = Path((FOLDER / f"script-{os.getpid()}").read_text())
    exec(compile(script.read_text(), str(script), "exec"), {})


def wait_while(name: str) -> None:
    while (FOLDER / name).exists():
        time.sleep(0.02)


def main() -> None:
    signal.signal(signal.SIGUSR1, run_script)
    rank = int(os.environ["RANK"])
    (FOLDER / f"ready-{rank}").touch()
    wait_while("wait")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(nn.Sequential(*layers))
    sharded = nn.Linear(4, 4)
    if dist.get_world_size() > 1:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD([*model.parameters(), *sharded.parameters()], lr=0.1)
    data, target = torch.randn(8, 16), torch.randint(0, 4, (8,))
    work, losses, over = None, [], False
    while not over:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(sharded(model(data)), target)
        loss.backward()
        if work is not None:
            work.wait()
        stopped = torch.tensor(float((FOLDER / "stop").exists()))
        dist.all_reduce(stopped)
        # In flight while the step ends.
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        optimizer.step()
        losses.append(loss.item())
        over = bool(stopped) if STEPS is None else len(losses) == STEPS
        if STEPS is None:
            time.sleep(0.01)
            (FOLDER / f"trains-{rank}").touch()
            if rank == 1:
                wait_while("block")
    assert work is not None
    work.wait()
    if rank == 0:
        sys.stdout.write("".join(f"rank 0 loss {loss!r}\n" for loss in losses))
    dist.destroy_process_group()


main()
