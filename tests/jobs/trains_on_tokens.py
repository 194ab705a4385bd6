"""A small language model under DDP; prints the floating-point operations of a step.

PyTorch's own counter counts them, in a step after the others. With ``until PATH``, the job trains
until a file exists.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

BATCH, LENGTH, STEPS = 4, 12, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.mix = nn.Conv1d(32, 32, 3, stride=2, padding=1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        mixed = self.mix(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(checkpoint(self.layer, mixed, use_reentrant=False))


class Texts(Dataset):
    def __len__(self):
        return 2 * BATCH * STEPS

    def __getitem__(self, place):
        return {"weight": torch.ones(()), "input_ids": torch.arange(LENGTH) + place % 50}


def main():
    until = Path(sys.argv[2]) if len(sys.argv) > 1 else None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batch):
        optimizer.zero_grad()
        model(batch["input_ids"]).square().mean().backward()
        optimizer.step()

    data = Texts()
    goes_on = torch.ones(1)
    while goes_on:
        for batch in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
            train(batch)
            if until is not None:
                time.sleep(0.005)
        goes_on = torch.tensor([float(until is not None and not until.exists())])
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    with FlopCounterMode(display=False) as counter:
        train(batch)
    sys.stdout.write(f"flops {counter.get_total_flops()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
