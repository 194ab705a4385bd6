"""A GAN: in each iteration, its two models train in turns, each with its own optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ITERATIONS = 12


def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judge = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(16, 1), torch.zeros(16, 1)
    for _ in range(ITERATIONS):
        of_critic.zero_grad()
        made = generator(torch.randn(16, 4)).detach()
        both = critic(torch.cat([torch.randn(16, 2), made]))
        judge(both, torch.cat([real, fake])).backward()
        of_critic.step()
        of_generator.zero_grad()
        judge(critic(generator(torch.randn(16, 4))), real).backward()
        of_generator.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
