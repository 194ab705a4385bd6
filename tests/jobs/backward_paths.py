"""Trains in many ways to make gradients. Usage: backward_paths.py SEED OUTPUT PATH...

Each path trains a model of its own. After it, every rank appends the path and the final weights to
its own file, so that a job that a strategy ends shows how far it has come.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RATE = 0.05


class Small(nn.Module):
    """Two layers and, if asked, a checkpoint around the first."""

    def __init__(self, width, reentrant=None):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)
        self.reentrant = reentrant

    def forward(self, inputs):
        if self.reentrant is None:
            hidden = self.first(inputs)
        else:
            hidden = checkpoint(self.first, inputs, use_reentrant=self.reentrant)
        return self.second(torch.tanh(hidden))


class Training:
    """One path: a model with its optimizer and data that differ by rank."""

    def __init__(self, path, seed):
        choices = random.Random(f"{seed} {path}")
        self.width, self.steps = choices.randint(2, 5), choices.choice([4, 6])
        torch.manual_seed(choices.randrange(1 << 20))
        reentrant = {"checkpoint": False, "reentrant checkpoint": True}.get(path)
        self.model = Small(self.width, reentrant)
        self.ddp = self.model if path.startswith("alone") else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.data = torch.Generator().manual_seed(choices.randrange(1 << 20) + dist.get_rank())

    def inputs(self):
        return torch.randn(4, 3, generator=self.data, requires_grad=True)

    def loss(self, model=None):
        return (self.ddp if model is None else model)(self.inputs()).square().mean()


def stepping(backward):
    """A path in which an optimizer steps after each call of a function."""

    def train(training):
        for step in range(training.steps):
            training.optimizer.zero_grad()
            backward(training, step)
            training.optimizer.step()

    return train


def plain(training, step):
    del step
    training.loss().backward()


def by_hand(training):
    for _ in range(training.steps):
        training.loss().backward()
        for parameter in training.model.parameters():
            parameter.data -= RATE * parameter.grad
            parameter.grad = None


def by_hand_in_place(training):
    for _ in range(training.steps):
        training.loss().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.sub_(parameter.grad, alpha=RATE)
        training.model.zero_grad()


def grad_set_by_hand(training, step):
    del step
    parameters = list(training.model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(training.loss(), parameters), strict=True
    ):
        parameter.grad = gradient


def grad_by_hand(training):
    parameters = list(training.model.parameters())
    for _ in range(training.steps):
        gradients = torch.autograd.grad(training.loss(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)


def functorch(training, step):
    del step
    inputs = training.inputs().detach()
    parameters = dict(training.model.named_parameters())

    def loss(values):
        return torch.func.functional_call(training.model, values, (inputs,)).square().mean()

    gradients = torch.func.grad(loss)({k: v.detach() for k, v in parameters.items()})
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]


def functional_call(training, step):
    del step
    values = {f"module.{k}": v for k, v in training.model.named_parameters()}
    output = torch.func.functional_call(training.ddp, values, (training.inputs(),))
    output.square().mean().backward()


def skipping_hooks(training, step):
    handles = [
        training.model.first.bias.register_hook(lambda g: g * (step % 2)),
        training.model.second.bias.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", None) if step % 3 == 1 else None
        ),
    ]
    training.loss().backward()
    for handle in handles:
        handle.remove()


def double_backward(training, step):
    del step
    inputs = training.inputs()
    loss = training.ddp(inputs).square().mean()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().mean()).backward()


def several(training, step):
    for _ in range(1 + step % 3):
        training.loss().backward()


def retained(training, step):
    del step
    loss = training.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(training, step):
    del step
    first, second = training.loss(), training.loss()
    first.backward()
    second.backward()


def joint(training, step):
    del step
    (training.loss() + training.loss()).backward()


def none_in_some(training, step):
    if step % 2 == 0:
        training.loss().backward()


def under_no_sync(training, step):
    with training.ddp.no_sync():
        training.loss().backward()
    if step % 2:
        training.loss().backward()


def never_synchronized(training, step):
    del step
    with training.ddp.no_sync():
        training.loss().backward()


def around_wrapper(training, step):
    del step
    training.loss(training.model).backward()


def dist_autograd(training):
    import torch.distributed.autograd as context_autograd

    if not rpc.api._is_current_rpc_agent_set():
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{RPC_FILE}")
        rank = dist.get_rank()
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    for _ in range(training.steps):
        with context_autograd.context() as number:
            context_autograd.backward(number, [training.loss()])
            gradients = context_autograd.get_gradients(number)
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.sub_(gradients[parameter], alpha=RATE)


PATHS = {
    "alone": stepping(plain),
    "alone by hand": by_hand,
    "alone, grad by hand": grad_by_hand,
    "plain": stepping(plain),
    "by hand": by_hand,
    "by hand in place": by_hand_in_place,
    "grad set by hand": stepping(grad_set_by_hand),
    "grad by hand": grad_by_hand,
    "functorch": stepping(functorch),
    "functional call": stepping(functional_call),
    "skipping hooks": stepping(skipping_hooks),
    "checkpoint": stepping(plain),
    "reentrant checkpoint": stepping(plain),
    "double backward": stepping(double_backward),
    "several": stepping(several),
    "retained": stepping(retained),
    "two forwards": stepping(two_forwards),
    "joint": stepping(joint),
    "none in some": stepping(none_in_some),
    "under no_sync": stepping(under_no_sync),
    "never synchronized": stepping(never_synchronized),
    "around wrapper": stepping(around_wrapper),
    "dist autograd": dist_autograd,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    RPC_FILE = Path(tempfile.gettempdir()) / f"rpc-{os.environ['MASTER_PORT']}-{os.getppid()}"
    dist.init_process_group("gloo")
    with Path(f"{sys.argv[2]}.{dist.get_rank()}").open("w") as found:
        for path in sys.argv[3:]:
            training = Training(path, sys.argv[1])
            PATHS[path](training)
            weights = [p.flatten().tolist() for p in training.model.parameters()]
            # What is known only at the end of the job belongs to its last path.
            if path == sys.argv[-1]:
                dist.barrier()
                if rpc.api._is_current_rpc_agent_set():
                    rpc.shutdown()
                dist.destroy_process_group()
            found.write(json.dumps([path, weights]) + "\n")
            found.flush()
