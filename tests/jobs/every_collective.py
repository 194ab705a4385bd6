"""Every way to communicate that Gloo has, each inside a marker; four ranks.

Every section checks what it computed, so a tracer that changed a result would fail the job.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import ddltrace

WORLD = 4
SECTIONS = []


def section(function):
    SECTIONS.append(function)
    return function


@section
def plain(rank):
    total = torch.full((10,), float(rank))
    dist.all_reduce(total)
    assert total[0].item() == sum(range(WORLD))
    dist.broadcast(torch.ones(7, dtype=torch.int32), src=2)
    dist.reduce(torch.ones(6, dtype=torch.float64), dst=1)
    gathered = [torch.empty(4) for _ in range(WORLD)]
    dist.all_gather(gathered, torch.full((4,), float(rank)))
    assert [g[0].item() for g in gathered] == [0, 1, 2, 3]
    dist.all_gather_into_tensor(torch.empty(4 * WORLD), torch.ones(4))
    scattered = torch.empty(3)
    dist.reduce_scatter(scattered, [torch.full((3,), float(i)) for i in range(WORLD)])
    assert scattered[0].item() == WORLD * rank
    dist.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * WORLD))
    dist.gather(torch.ones(2), [torch.empty(2) for _ in range(WORLD)] if rank == 3 else None, dst=3)
    dist.scatter(torch.empty(9), [torch.ones(9) for _ in range(WORLD)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty(8), torch.ones(8))
    dist.barrier()
    dist.monitored_barrier()


@section
def asynchronous(rank):
    works = [
        dist.all_reduce(torch.ones(11), async_op=True),
        dist.broadcast(torch.ones(12), src=0, async_op=True),
        dist.all_gather_into_tensor(torch.empty(WORLD * 3), torch.ones(3), async_op=True),
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * WORLD), async_op=True),
        dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()


@section
def waits(rank):
    twice = dist.all_reduce(torch.ones(21), async_op=True)
    twice.wait()
    twice.wait()
    value = dist.all_reduce(torch.ones(22), async_op=True).get_future().wait()
    assert value[0][0].item() == WORLD
    doubled = (
        dist.all_reduce(torch.ones(23), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    )
    assert doubled.wait()[0].item() == 2 * WORLD
    polled = dist.all_reduce(torch.ones(24), async_op=True)
    while not polled.is_completed():
        pass
    dist.all_reduce(torch.ones(25), async_op=True)  # no wait follows
    torch.futures.wait_all([dist.all_reduce(torch.ones(26), async_op=True).get_future()])


@section
def late(rank):
    """A wait that runs out of time before the others come; the message then completes."""
    if rank == 0:
        work = dist.all_reduce(torch.ones(31), async_op=True)
        timed_out = False
        try:
            work.wait(timedelta(milliseconds=20))
        except RuntimeError:
            timed_out = True
        assert timed_out
        dist.send(torch.ones(1), 1)
        work.wait()
        return
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    else:
        dist.recv(torch.empty(1), rank - 1)
    if rank < WORLD - 1:
        dist.send(torch.ones(1), rank + 1)
    dist.all_reduce(torch.ones(31))


@section
def coalesced(rank):
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)])
    first, second = torch.ones(6), torch.ones(7)
    with dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first[0].item() == second[0].item() == WORLD
    with dist._coalescing_manager(async_ops=True) as manager:
        for size in (2, 3):
            dist.all_gather_into_tensor(torch.empty(WORLD * size), torch.ones(size))
    manager.wait()
    with dist._coalescing_manager():
        for size in (4, 5):
            dist.reduce_scatter_tensor(torch.empty(size), torch.ones(WORLD * size))
    dist.all_gather_coalesced(
        [[torch.empty(2), torch.empty(3)] for _ in range(WORLD)], [torch.ones(2), torch.ones(3)]
    )


@section
def uneven(rank):
    sizes = [1, 2, 3, 4]
    received = torch.empty(WORLD * sizes[rank])
    dist.all_to_all_single(received, torch.arange(10.0), [sizes[rank]] * WORLD, sizes)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.all_reduce(torch.empty(0))
    dist.all_reduce(torch.ones(3, dtype=torch.complex64))
    dist.all_reduce(torch.ones(4, dtype=torch.bfloat16))
    dist.all_reduce(torch.ones(5, dtype=torch.bool), op=dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(4, 6)[:, ::2].contiguous(), src=0)


@section
def sparse(rank):
    tensor = torch.sparse_coo_tensor([[rank, 7]], [1.0, 2.0], (8,))
    dist.all_reduce(tensor)
    assert tensor.to_dense()[7].item() == 2.0 * WORLD


@section
def modes(rank):
    with torch.no_grad():
        dist.all_reduce(torch.ones(41))
    with torch.inference_mode():
        dist.all_reduce(torch.ones(42))
        dist.all_reduce(torch.ones(43), async_op=True).wait()
    traced = torch.ones(44, requires_grad=True)
    with torch.no_grad():
        dist.broadcast(traced, src=0)


@section
def points(rank):
    following, former = (rank + 1) % WORLD, (rank - 1) % WORLD
    outgoing, incoming = torch.full((100,), float(rank)), torch.empty(100)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, following), dist.P2POp(dist.irecv, incoming, former)]
    ):
        work.wait()
    assert incoming[0].item() == former
    receiving = dist.irecv(incoming, former, tag=5)
    sending = (
        dist.isend(outgoing[:50], following, tag=5)
        if False
        else dist.isend(outgoing, following, tag=5)
    )
    receiving.wait()
    sending.wait()
    if rank == 0:
        senders = {dist.recv(torch.empty(9)) for _ in range(WORLD - 1)}
        assert senders == {1, 2, 3}
    else:
        dist.send(torch.ones(9), 0)
    if rank % 2 == 0:
        dist.send_object_list(["x"], dst=following)
    else:
        objects = [None]
        dist.recv_object_list(objects, src=former)
        assert objects == ["x"]


@section
def objects(rank):
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert [g["rank"] for g in gathered] == [0, 1, 2, 3]
    listed = [{"from": rank}]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [{"from": 1}]
    into = [None]
    dist.scatter_object_list(into, ["a", "b", "c", "d"] if rank == 0 else None, src=0)
    assert into == ["abcd"[rank]]
    dist.gather_object(rank, [None] * WORLD if rank == 2 else None, dst=2)


@section
def groups(rank):
    even = dist.new_group([0, 2], group_desc="even")
    odd = dist.new_group([1, 3], group_desc="odd")
    mine = even if rank % 2 == 0 else odd
    for _ in range(3):
        dist.all_reduce(torch.ones(51), group=mine)
    dist.broadcast(torch.ones(52), src=3 if rank % 2 else 2, group=mine)
    # The second member of the group sends to the first.
    if rank >= 2:
        dist.send(torch.ones(53), group=mine, group_dst=0)
    else:
        dist.recv(torch.empty(53), group=mine, group_src=1)
    own = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(54), group=own)
    middle = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(55), group=middle)  # for ranks 0 and 3 nothing happens
    world = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(56), group=world)
    dist.destroy_process_group(middle)


@section
def mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    dist.all_reduce(torch.ones(61), group=mesh.get_group("rows"))
    dist.all_reduce(torch.ones(62), group=mesh.get_group("columns"))
    dist.all_reduce(torch.ones(63), group=mesh["rows", "columns"]._flatten("all").get_group())


@section
def functional(rank):
    group = dist.group.WORLD
    total = funcol.all_reduce(torch.full((71,), 1.0), "sum", group)
    assert (total + 0)[0].item() == WORLD  # using it waits
    gathered = funcol.all_gather_tensor(torch.ones(3), 0, group)
    assert funcol.wait_tensor(gathered).shape == (3 * WORLD,)
    scattered = funcol.reduce_scatter_tensor(torch.ones(2 * WORLD), "sum", 0, group)
    assert scattered.sum().item() == 2 * WORLD
    pair = funcol.all_reduce_coalesced([torch.ones(4), torch.ones(5)], "sum", group)
    assert pair[1].sum().item() == 5 * WORLD
    exchanged = funcol.all_to_all_single(torch.ones(WORLD), None, None, group)
    assert exchanged.sum().item() == WORLD
    assert (funcol.broadcast(torch.full((6,), float(rank)), 2, group) + 0)[0].item() == 2


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    only = sys.argv[1:]
    for function in SECTIONS:
        if only and function.__name__ not in only:
            continue
        with ddltrace.annotate(function.__name__):
            function(rank)
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} done\n")


if __name__ == "__main__":
    main()
