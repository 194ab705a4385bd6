"""Jobs to which a strategy cannot be applied. Usage: not_for_strategies.py CASE...

Each case is a job of its own. With more than one, the end of each is caught, so that all cases
share one start; those without DistributedDataParallel have to come first.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def sharded(case, model):
    """A model that another package distributes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if case == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    if case == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if case == "tensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return model


def in_ddp(case, model):
    """A model in DistributedDataParallel, with an option that strategies do not have."""
    if case == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    options = {}
    if case == "delay":
        options["delay_all_reduce_named_params"] = [("0.weight", model[0].weight)]
        options["param_to_hook_all_reduce"] = model[0].bias
    if case == "mixed":
        from torch.nn.parallel.distributed import _MixedPrecision

        options["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16)
    module, model = model, DistributedDataParallel(model, **options)
    if case == "former":
        DistributedDataParallel(module)
    if case == "hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if case == "built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def train(case):
    """Trains some steps."""
    model = nn.Sequential(nn.Linear(4, 4))
    make = sharded if case in {"fsdp", "fsdp1", "tensor", "none"} else in_ddp
    model = make(case, model)
    kind = torch.optim.LBFGS if case == "lbfgs" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with model.join() if case == "join" else contextlib.nullcontext():
        for _ in range(20):
            optimizer.step(closure)
            sys.stdout.write("trained\n")


dist.init_process_group("gloo")
cases = sys.argv[1:]
if len(cases) == 1:
    train(cases[0])
for case in cases:
    try:
        train(case)
    except SystemExit as end:
        sys.stdout.write(f"ended with {end.code}: {case}\n")
