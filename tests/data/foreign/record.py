"""Records the fixtures beside this file: Kineto and Flight Recorder files of a real job.

Run with: TORCH_FR_BUFFER_SIZE=64 torchrun --nproc-per-node 2 record.py OUTPUT_FOLDER
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 4


def main() -> None:
    """Trains a small model on two ranks, with every kind of message that a test looks for."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64 // STEPS)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=2),
    ) as profiler:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values = torch.full((1000,), float(rank))
            dist.all_reduce(values)
            dist.all_gather([torch.empty(100) for _ in range(2)], torch.ones(100))
            if rank == 0:
                dist.send(torch.ones(77), 1)
            else:
                dist.recv(torch.empty(77), 0)
            dist.broadcast(values, 0, async_op=True).wait()
            profiler.step()
    plain = folder / f"rank-{rank}.json"
    profiler.export_chrome_trace(str(plain))
    kineto = folder / "kineto-cpu"
    kineto.mkdir(exist_ok=True)
    (kineto / f"rank-{rank}.json.gz").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()
    recorder = folder / "flight-recorder"
    recorder.mkdir(exist_ok=True)
    dump = torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False)
    (recorder / f"nccl_trace_rank_{rank}").write_bytes(dump)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
