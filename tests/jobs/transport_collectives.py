"""Compares each collective of a transport with Gloo's. Usage: transport_collectives.py TRANSPORT"""

import sys

import torch
import torch.distributed as dist

from ddltrace.experiments.transports import read
from ddltrace.experiments.transports.backends.register import backend_of

SIZES = (0, 1, 2, 7, 1000, 100_001)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
everyone = list(range(ranks))
backend = backend_of(read(sys.argv[1])[1])
group = dist.new_group(everyone, backend=backend)
other = dist.new_group(everyone, backend=backend)
generator = torch.Generator().manual_seed(7)

for size in SIZES:
    inputs = torch.randn(ranks, size, generator=generator)
    own = inputs[rank]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        found, expected = own.clone(), own.clone()
        dist.all_reduce(found, op=op, group=group)
        dist.all_reduce(expected, op=op)
        torch.testing.assert_close(found, expected)
    gathered = [torch.empty(size) for _ in everyone]
    dist.all_gather(gathered, own, group=group)
    assert torch.equal(torch.stack(gathered), inputs)
    root = ranks - 1
    broadcast = own.clone()
    dist.broadcast(broadcast, root, group=group)
    assert torch.equal(broadcast, inputs[root])
    reduced = own.clone()
    dist.reduce(reduced, root, group=group)
    if rank == root:
        torch.testing.assert_close(reduced, inputs.sum(0))
    if size:
        sent = torch.arange(float(ranks * size)) + rank * 1e6
        received = torch.empty(ranks * size)
        dist.all_to_all_single(received, sent, group=group)
        mine = torch.arange(float(ranks * size)).view(ranks, size)[rank]
        assert torch.equal(received, torch.cat([mine + peer * 1e6 for peer in everyone]))
        shares = [torch.full((size,), float(rank + 1)) for _ in everyone]
        share = torch.empty(size)
        dist.reduce_scatter(share, shares, group=group)
        assert torch.equal(share, torch.full((size,), ranks * (ranks + 1) / 2))
    # Sends are matched by tag, in whatever order they are received, in a group of their own.
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    sends = [dist.isend(own + tag, group=other, group_dst=right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        arrived = torch.empty(size)
        dist.recv(arrived, group=other, group_src=left, tag=tag)
        assert torch.equal(arrived, inputs[left] + tag)
    for send in sends:
        send.wait()
    dist.barrier(group=group)

strided = torch.arange(12.0).view(3, 4).t()
expected = strided * ranks
dist.all_reduce(strided, group=group)
assert torch.equal(strided, expected)
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} agrees\n")
