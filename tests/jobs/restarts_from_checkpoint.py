"""Trains with checkpoints and evaluations; under torchrun, rank 1 dies in the first attempt.

Prints losses, and for each rank how long checkpoints and evaluations took. The store of each
attempt is its own, as in ``restarts.py``.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_S, EVALUATION_S, START_S, BEFORE_DEATH_S = 0.3, 0.4, 0.25, 1.5
SAVED_AFTER, LAST_OF_FIRST, STEPS = 4, 6, 10
TOOK = {"checkpoint": 0.0, "evaluation": 0.0}


@contextlib.contextmanager
def timed(part: str):
    begin = time.monotonic()
    yield
    TOOK[part] += time.monotonic() - begin


def show(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # at once: the other rank prints as well


torch.set_num_threads(1)
folder = Path(sys.argv[1])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1"))
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/store-{attempt}",
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
)
beside = dist.new_group()  # its collectives run while those of training do


class SlowFile:
    """A file in memory that takes long to be flushed."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        time.sleep(SAVE_S)


class Evaluated(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            time.sleep(EVALUATION_S / 4)
        return super().forward(inputs)


torch.manual_seed(0)
model = DistributedDataParallel(Evaluated(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
checkpoint = folder / "checkpoint.pt"
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    first = state["step"]
time.sleep(START_S)
for step in range(first, STEPS):
    loss = model(torch.full((2, 8), 1.0 + step + rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"rank {rank} step {step} loss {loss.item().hex()}")
    if attempt == 0 and step + 1 == SAVED_AFTER:
        if rank == 0:
            state = {"model": model.state_dict(), "step": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").rename(checkpoint)
        dist.barrier()
    if attempt == 0 and step == LAST_OF_FIRST:
        time.sleep(BEFORE_DEATH_S)  # so that the events of the steps are written
        if rank == 1:
            os._exit(9)
    if attempt == 1 and step == LAST_OF_FIRST + 1:
        with timed("checkpoint"):
            torch.save(model.state_dict(), SlowFile())
        with timed("evaluation"), torch.no_grad():
            model.eval()
            for _ in range(4):
                model(torch.ones(2, 8))
            model.train()
        with timed("checkpoint"):
            written = dcp.async_save(
                model.module.state_dict(), checkpoint_id=folder / "async", process_group=beside
            )
written.result()
with timed("checkpoint"):
    dcp.save(model.module.state_dict(), checkpoint_id=folder / "distributed")
show(f"rank {rank} took {json.dumps(TOOK)}")
dist.destroy_process_group()
