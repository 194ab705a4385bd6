"""Collectives launched by Python in plain ways and in others; two ranks.

At the end each rank prints how many launches passed Python's kernels by: of all of them C++ and the
writer made the message.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages

STEPS = 6
unwaited = []  # while it is under way, its memory has to last


def say(line):
    """In one piece: two ranks share the output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def count(owner, method):
    """What a method has returned so far."""
    returned = []
    original = getattr(owner, method)

    def counting(*args, **kwargs):
        result = original(*args, **kwargs)
        returned.append(result)
        return result

    setattr(owner, method, counting)
    return returned


class Seeing(TorchDispatchMode):
    """A mode of the job's: it must see its collectives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Derived(dist.ProcessGroup):
    """A group in Python that leaves its methods to its base class, whose backend is Gloo's."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        device = torch.device("cpu")
        self._register_backend(
            device, dist.ProcessGroup.BackendType.GLOO, inner._get_backend(device)
        )
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._set_group_name("derived")

    @property
    def group_name(self):
        return "derived"

    def getBackendName(self):
        return "gloo"


def plain(rank, group):
    """With all methods, as torch.distributed calls them."""
    total = torch.full((10,), float(rank))
    dist.all_reduce(total, group=group)
    assert total[0].item() == 1
    work = dist.all_reduce(total, async_op=True, group=group)
    work.wait()
    sent = torch.full((7,), rank, dtype=torch.int32)
    dist.broadcast(sent, src=1, group=group)
    assert sent[0].item() == 1
    dist.reduce(torch.ones(6, dtype=torch.float64), dst=1, group=group)
    gathered = [torch.empty(4), torch.empty(4)]
    dist.all_gather(gathered, torch.full((4,), float(rank)), group=group)
    assert [g[0].item() for g in gathered] == [0, 1]
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
    into = [torch.empty(2), torch.empty(2)] if rank == 1 else None
    dist.gather(torch.ones(2), into, dst=1, group=group)
    parts = [torch.ones(9), torch.ones(9)] if rank == 0 else None
    dist.scatter(torch.empty(9), parts, group=group)
    dist.all_to_all_single(torch.empty(8), torch.ones(8), group=group)
    uneven = [3, 5] if rank == 0 else [5, 3]
    dist.all_to_all_single(torch.empty(8), torch.ones(8), uneven, uneven)
    parts = [torch.ones(2, 2), torch.ones(2, 2)]  # Gloo takes only equal ones
    dist.all_to_all([torch.empty(2, 2), torch.empty(2, 2)], parts)
    scattered = torch.empty(5)
    dist.reduce_scatter_tensor(scattered, torch.ones(10), group=group)
    dist.reduce_scatter(scattered, [torch.ones(5), torch.ones(5)], group=group)
    work = dist.reduce_scatter_tensor(scattered, torch.ones(10), group=group, async_op=True)
    work.wait()
    assert scattered[0].item() == 2
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()


def between_two(rank, group):
    """Sends and receives."""
    other = 1 - rank
    for tag in (0, 0, 9):
        exchange = [dist.isend(torch.full((4,), float(rank)), other, group, tag)]
        received = torch.empty(4)
        exchange.append(dist.irecv(received, other, group, tag))
        for work in reversed(exchange):
            work.wait()
        assert received[0].item() == other
    if rank == 0:
        dist.send(torch.arange(3), 1, group)
        dist.send(torch.arange(3), 1, group)
    else:
        assert dist.recv(torch.empty(3, dtype=torch.int64), 0, group) == 0
        assert dist.recv(torch.empty(3, dtype=torch.int64), None, group) == 0
    both = [
        dist.P2POp(dist.isend, torch.ones(2), other, group),
        dist.P2POp(dist.irecv, torch.empty(2), other, group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    unwaited.append(dist.isend(torch.ones(6), other, group, tag=3))
    dist.irecv(torch.empty(6), other, group, tag=3).wait()


def functional(rank, group):
    """Functional collectives: used at once, later, never; in and below what PyTorch compiles."""
    tensor, name = torch.full((4,), float(rank)), group.group_name
    assert (funcol.all_reduce(tensor, "sum", group) + 0)[0].item() == 1
    gathered = funcol.all_gather_tensor(tensor, 0, group)
    scattered = funcol.reduce_scatter_tensor(torch.ones(6), "sum", 0, group)
    assert scattered.wait()[0].item() == 2
    assert gathered.wait()[4].item() == 1
    exchanged = funcol.all_to_all_single(torch.full((2,), float(rank)), None, None, group)
    assert exchanged.tolist() == [0, 1]
    assert funcol.broadcast(tensor, 1, group).tolist() == [1.0] * 4
    ops = torch.ops._c10d_functional
    unwaited.append(ops.all_reduce.default(torch.ones(3), "sum", name))
    in_place = ops.wait_tensor.default(ops.all_reduce_.default(torch.ones(3), "max", name))
    assert in_place.tolist() == [1.0] * 3
    by_name = ops.all_reduce(input=torch.ones(3), reduce_op="sum", group_name=name)
    assert ops.wait_tensor(by_name)[0].item() == 2
    several = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(5)], "sum", group)
    assert [s[0].item() for s in several] == [2, 2]
    gradient = torch.ones(3, requires_grad=True)
    funcol.all_gather_tensor_autograd(gradient, 0, group).sum().backward()
    assert gradient.grad.tolist() == [2.0] * 3
    conjugated = torch.complex(torch.ones(3), torch.ones(3)).conj()
    assert funcol.all_reduce(conjugated, "sum", group).wait()[0].item() == 2 - 2j
    with torch.inference_mode():
        assert funcol.all_reduce(tensor.clone(), "sum", group).tolist() == [1.0] * 4
    with Seeing() as mode:
        assert funcol.all_reduce(tensor.clone(), "sum", group).wait()[0].item() == 1
    assert any("all_reduce" in seen for seen in mode.seen), mode.seen
    for wrong in ("of no group", 3):
        try:
            ops.all_reduce(tensor, "sum", wrong)
        except RuntimeError:
            continue
        raise AssertionError(wrong)


def by_method(rank, group):
    """The methods themselves, with arguments of every kind."""
    tensor, options = torch.ones(3), dist.AllreduceOptions()
    group.allreduce([tensor], options).wait()
    group.allreduce((tensor,), options).wait()
    group.allreduce([tensor], opts=options).wait()
    group.allreduce(tensor).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    group.broadcast(tensor, root=1).wait()
    group.allreduce([tensor]).get_future().then(lambda future: future.value()).wait()
    assert tensor[0].item() == 32
    for wrong in ([], [[]], [None]):
        try:
            group.allreduce(wrong, options)
        except (TypeError, RuntimeError, IndexError, ValueError):
            continue
        raise AssertionError(wrong)
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.MAX)
    except (RuntimeError, ValueError):
        pass
    else:
        raise AssertionError("a maximum of complex numbers")


def strange(rank, group):
    """Tensors and modes that a kernel has to see."""
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5))
        inside = torch.ones(5)
    dist.all_reduce(inside)
    with torch.no_grad():
        dist.all_reduce(nn.Parameter(torch.ones(5)))
    with FakeTensorMode():
        dist.all_reduce(torch.ones(5, dtype=torch.float16))
    dist.all_reduce(torch.ones(5, dtype=torch.float16, device="meta"))
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.ones(2), (5,))
    dist.all_reduce(sparse)
    dist.all_reduce(torch.empty(0))
    negative = (torch.ones(4, dtype=torch.complex64) * 1j * (rank + 1)).conj().imag
    assert negative.is_neg()
    dist.broadcast(negative, src=1)
    say(f"rank {rank} loss of the negative {negative.tolist()}")
    # PyTorch holds Python's lock while a group in Python queues a message, and Gloo's thread needs
    # that lock, while it locks the queue, to free the message before: works keep it.
    with Seeing() as mode:
        works = [dist.all_reduce(torch.ones(5), async_op=True)]
        works[0].wait()
    assert any("allreduce" in name for name in mode.seen), mode.seen
    derived = Derived(group)
    for _ in range(2):
        works.append(derived.allreduce([torch.ones(2)], dist.AllreduceOptions()))
        works[-1].wait()


def in_backward(rank, group):
    """By a hook of the job's, with memory that a bucket of DDP fills."""
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 3, bias=False))
    model = DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = nn.Parameter(torch.ones(6))
    own.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    last = model.module[1].weight
    last.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for parameter in alone.parameters():  # before the tracer has seen them
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        own.grad = None
        alone.zero_grad()
        alone(torch.ones(2, 4)).sum().backward()
        ((own.sum() + 1) * model(torch.ones(4, 8)).square().mean()).backward()
        optimizer.step()
    with CommDebugMode() as mode:
        model(torch.ones(4, 8)).sum().backward()
    assert mode.get_total_counts() >= 2, mode.get_comm_counts()
    say(f"rank {rank} loss {last.sum().item().hex()} {own.grad.sum().item().hex()}")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    in_ring = count(KnownMessages, "launched")
    rank, world = dist.get_rank(), dist.group.WORLD
    other = dist.new_group(group_desc="other")
    torch.manual_seed(0)
    dist.barrier()  # the first message shows that Gloo blocks
    for section in (plain, between_two, functional, by_method, strange, in_backward):
        section(rank, world)
    plain(rank, other)
    between_two(rank, other)
    dist.barrier()
    assert None not in in_ring
    say(f"passed by {len(in_ring)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
