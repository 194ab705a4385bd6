"""Every way to train, each scenario inside a marker; prints every loss to the last bit.

Usage: every_training.py SCENARIO...
"""

import copy
import io
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ddltrace

STEPS = 4
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """Three layers, 20 x 32 + 32 + 32 x 32 + 32 + 32 x 4 + 4 = 1860 parameters."""

    def __init__(self, tag):
        super().__init__()
        torch.manual_seed(7)
        self.add_module(f"{tag}_in", nn.Linear(20, 32))
        self.add_module(f"{tag}_mid", nn.Linear(32, 32))
        self.add_module(f"{tag}_out", nn.Linear(32, 4))

    def forward(self, x):
        first, second, third = self.children()
        return third(torch.relu(second(torch.relu(first(x)))))


def batches(steps=STEPS, seed=0):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        yield (
            torch.randn(8, 20, generator=generator),
            torch.randint(0, 4, (8,), generator=generator),
        )


def train(model, optimizer, losses, data=None):
    for x, y in data if data is not None else batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@scenario
def ddp(losses):
    model = DistributedDataParallel(Net("ddp"), bucket_cap_mb=0.005)
    train(model, sgd(model, momentum=0.9), losses)


@scenario
def bucket_view(losses):
    model = DistributedDataParallel(
        Net("bucket_view"), gradient_as_bucket_view=True, bucket_cap_mb=0.003
    )
    train(model, sgd(model), losses)


@scenario
def static_graph(losses):
    model = DistributedDataParallel(Net("static_graph"), static_graph=True)
    train(model, sgd(model), losses)


class Branches(nn.Module):
    """Uses one of two branches, by turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.unused_left = nn.Linear(20, 4)
        self.unused_right = nn.Linear(20, 4)
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        return (self.unused_left if self.turn % 2 else self.unused_right)(x)


@scenario
def unused_parameters(losses):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    train(model, sgd(model), losses)


@scenario
def fp16_hook(losses):
    model = DistributedDataParallel(Net("fp16_hook"))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, sgd(model), losses)


@scenario
def power_sgd(losses):
    model = DistributedDataParallel(Net("power_sgd"))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model), losses)


@scenario
def python_hook(losses):
    model = DistributedDataParallel(Net("python_hook"), bucket_cap_mb=0.003)

    def gather_and_add(_, bucket):
        buffer = bucket.buffer()
        everyone = torch.empty(dist.get_world_size() * buffer.numel())
        future = dist.all_gather_into_tensor(everyone, buffer, async_op=True).get_future()
        return future.then(lambda _: everyone.view(-1, buffer.numel()).mean(0))

    model.register_comm_hook(None, gather_and_add)
    train(model, sgd(model), losses)


@scenario
def gan(losses):
    generator = DistributedDataParallel(Net("generator"))
    torch.manual_seed(3)
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    of_generator, of_judge = sgd(generator), torch.optim.Adam(judge.parameters(), lr=0.01)
    for x, _ in batches():
        of_judge.zero_grad()
        fake = generator(x).detach()
        loss = judge(fake).mean() - judge(torch.randn(8, 4, generator=torch.Generator())).mean()
        loss.backward()
        of_judge.step()
        losses.append(loss)
        of_generator.zero_grad()
        loss = -judge(generator(x)).mean()
        loss.backward()
        of_generator.step()
        losses.append(loss)


@scenario
def grad_scaler(losses):
    model = DistributedDataParallel(Net("grad_scaler"))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        # An overflow in the second step: its update is skipped.
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)


@scenario
def checkpointed(losses):
    class Checkpointed(Net):
        def forward(self, x):
            first, second, third = self.children()
            return third(checkpoint(second, torch.relu(first(x)), use_reentrant=False))

    model = DistributedDataParallel(Checkpointed("checkpointed"))
    train(model, sgd(model), losses)


@scenario
def reentrant(losses):
    class Reentrant(Net):
        def forward(self, x):
            first, second, third = self.children()
            return third(checkpoint(second, torch.relu(first(x)), use_reentrant=True))

    model = DistributedDataParallel(Reentrant("reentrant"), static_graph=True)
    train(model, sgd(model), losses)


@scenario
def thawed(losses):
    """Frozen layers become trainable halfway; gradients are averaged by hand."""
    model = Net("thawed")
    model.thawed_in.requires_grad_(False)
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches()):
        if step == 2:
            model.thawed_in.requires_grad_(True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss)


@scenario
def copies(losses):
    """An average of the model beside it, by deepcopy, pickle and state_dict."""
    net = Net("copies")
    model = DistributedDataParallel(net)
    optimizer = sgd(model)
    average = copy.deepcopy(net)
    train(model, optimizer, losses, batches(2))
    with torch.no_grad():
        for mean, new in zip(average.parameters(), net.parameters(), strict=True):
            mean.lerp_(new, 0.5)
        losses.append(average(torch.ones(1, 20)).sum())
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    losses.append(again(torch.ones(1, 20)).sum())
    whole = copy.deepcopy(model)
    train(whole, sgd(whole), losses, batches(2))
    net.load_state_dict(average.state_dict())
    train(model, optimizer, losses, batches(2))


@scenario
def scripted(losses):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.scripted_in = nn.Linear(20, 8)
            self.scripted_out = nn.Linear(8, 4)

        def forward(self, x):
            return self.scripted_out(torch.relu(self.scripted_in(x)))

    plain = Plain()
    jitted = torch.jit.script(plain)
    frozen = torch.jit.trace(plain, torch.ones(1, 20))
    losses.append(frozen(torch.ones(2, 20)).sum())
    model = DistributedDataParallel(jitted)
    train(model, sgd(model), losses)


@scenario
def workers(losses):
    """A loader with worker processes, and an evaluation between the steps."""
    net = Net("workers")
    model = DistributedDataParallel(net)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(32, 20, generator=generator), torch.randint(0, 4, (32,), generator=generator)
    )
    optimizer = sgd(model)
    for x, y in DataLoader(data, batch_size=8, num_workers=2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum())
        model.train()


@scenario
def no_optimizer(losses):
    model = DistributedDataParallel(Net("no_optimizer"))
    for x, y in batches():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        losses.append(loss)


@scenario
def sparse_embedding(losses):
    torch.manual_seed(7)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(20, 4))
    )
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        tokens = (x.abs() * 10).long().clamp(max=49)[:, :5]
        loss = nn.functional.cross_entropy(model(tokens), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)


@scenario
def fsdp2(losses):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net("fsdp2")
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), losses)


@scenario
def fsdp1(losses):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    for original in (True, False):
        model = FullyShardedDataParallel(
            Net(f"fsdp1_{original}"),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        train(model, sgd(model), losses)


@scenario
def zero1(losses):
    model = DistributedDataParallel(Net("zero1"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, losses)


@scenario
def tensor_parallel(losses):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(
        Net("tp"), mesh, {"tp_in": ColwiseParallel(), "tp_mid": RowwiseParallel()}
    )
    optimizer = sgd(model, foreach=False)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # all ranks see the same batch
        x = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)


@scenario
def pipeline(losses):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    layers = [nn.Linear(20, 16), nn.Linear(16, 4)]
    stage_module = nn.Sequential(nn.Tanh(), layers[rank]) if rank else layers[0]
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = sgd(stage_module)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 20, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            of_micro = []
            schedule.step(target=y, losses=of_micro)
            losses.extend(of_micro)
        optimizer.step()


def _compiled(losses, backend, wrap):
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = Net(f"{wrap}_{backend}")
    if wrap == "inside":  # a hook of the job's own, in the graph
        next(net.children()).register_forward_hook(lambda *_: None)
    if wrap == "inside":
        model = DistributedDataParallel(torch.compile(net, backend=backend))
    elif wrap == "in_place":  # one layer, whose calls stay calls of a module
        list(net.children())[1].compile(backend=backend)
        model = DistributedDataParallel(net)
    else:
        model = torch.compile(DistributedDataParallel(net), backend=backend)
    train(model, sgd(model), losses)
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    losses.append(torch.tensor([float(graphs), float(breaks)]))


@scenario
def compiled(losses):
    _compiled(losses, "aot_eager", "inside")
    _compiled(losses, "aot_eager", "outside")


@scenario
def compiled_in_place(losses):
    _compiled(losses, "aot_eager", "in_place")


@scenario
def compiled_inductor(losses):
    _compiled(losses, "inductor", "inside")


@scenario
def compiled_functional(losses):
    import torch.distributed._functional_collectives as funcol

    @torch.compile(backend="aot_eager", fullgraph=True)
    def total(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    losses.append(total(torch.ones(5)).sum())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[1:]:
        losses = []
        with ddltrace.annotate(name):
            SCENARIOS[name](losses)
        for loss in losses:
            values = " ".join(v.hex() for v in loss.detach().double().flatten().tolist())
            sys.stdout.write(f"rank {rank} {name} loss {values}\n")
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
