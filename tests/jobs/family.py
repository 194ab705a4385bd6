"""A rank with relatives: a forked child, a helper process, a child of multiprocessing."""

import multiprocessing
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def help_out(queue):
    queue.put(torch.ones(3).sum().item())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 0:
            child = os.fork()
            if child == 0:
                model.module(torch.ones(2, 8)).sum().backward()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        if step == 1:
            code = "import torch; print(torch.ones(2).sum())"
            subprocess.run([sys.executable, "-c", code], check=True)
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            helper = context.Process(target=help_out, args=(queue,))
            helper.start()
            assert queue.get() == 3
            helper.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
