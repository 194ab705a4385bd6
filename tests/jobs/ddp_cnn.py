"""A small residual CNN with batch norm under DDP; prints the loss of every step, exactly."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.hidden = nn.Linear(width * 64, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        x = self.blocks(self.stem(x)).flatten(1)
        return self.head(torch.relu(self.hidden(x)))


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16 * steps, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (16 * steps,), generator=generator)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        sys.stdout.write(f"rank {dist.get_rank()} loss {loss.item().hex()}\n")
    model.eval()
    with torch.no_grad():
        model(images[:4])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
