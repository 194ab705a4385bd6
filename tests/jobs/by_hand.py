"""Calls collectives, send and receive itself; averages gradients tensor by tensor."""

import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        sys.stdout.write(f"rank {rank} loss {loss.item().hex()}\n")

    following, former = (rank + 1) % world, (rank - 1) % world
    outgoing, incoming = torch.full((1000,), float(rank)), torch.empty(1000)
    for tag in (0, 7):
        if rank % 2 == 0:
            dist.send(outgoing, following, tag=tag)
            dist.recv(incoming, former, tag=tag)
        else:
            dist.recv(incoming, former, tag=tag)
            dist.send(outgoing, following, tag=tag)
    assert incoming[0].item() == former
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, following), dist.P2POp(dist.irecv, incoming, former)]
    )
    for request in requests:
        request.wait()
    source = dist.recv(incoming) if rank == 0 else dist.send(outgoing[:500], 0)
    if rank == 0:
        assert source == 1

    with torch.inference_mode():
        dist.all_reduce(torch.ones(10))
    work = dist.all_reduce(torch.ones(100, dtype=torch.float64), async_op=True)
    work.wait()
    dist.broadcast(torch.ones(7, dtype=torch.int32), src=1)
    gathered = [torch.empty(4) for _ in range(world)]
    dist.all_gather(gathered, torch.ones(4))
    dist.all_gather_into_tensor(torch.empty(4 * world), torch.ones(4))
    dist.reduce(torch.ones(6), dst=0)
    dist.barrier()
    pair = dist.new_group(list(range(world)))
    dist.all_reduce(torch.ones(3), group=pair)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
