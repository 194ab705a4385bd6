"""A job of one rank with gradient hooks of its own: `hooked.py [compiled]`."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(3)
dist.init_process_group("gloo")
calls = []


class Tied(nn.Module):
    """A network that uses one of its parameters twice."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.late(self.frozen(self.early(self.early(x)))).square().mean()


def noting(name):
    return lambda parameter: calls.append((name, parameter.grad.sum().item()))


def train(model, steps, backward=torch.autograd.backward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):  # accumulated
            backward(model(torch.randn(4, 6)))
        optimizer.step()
        weight = model.early.weight.detach().sum().item()
        print(f"step loss {weight!r} {calls}", flush=True)
        calls.clear()


def main():
    model = Tied()
    before = model.early.bias.register_post_accumulate_grad_hook(noting("before"))
    train(model, 3)
    after = model.late.weight.register_post_accumulate_grad_hook(noting("after"))
    model.late.bias.register_post_accumulate_grad_hook(noting("later"))
    train(model, 3)
    before.remove()
    after.remove()
    model.frozen.requires_grad_(True)
    train(model, 3)
    torch.autograd.grad(model(torch.ones(1, 6)), list(model.early.parameters()))
    train(copy.deepcopy(model), 2)
    child = os.fork()
    if child == 0:
        train(model, 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(200):
        train(nn.ModuleDict({"early": nn.Linear(2, 2)}).train(), 0)
        copied = copy.deepcopy(model)
        copied(torch.ones(1, 6)).backward()
    print(len(list(model.early.weight._post_accumulate_grad_hooks or ())), flush=True)


def compiled():
    """Autograd's own graph is compiled: hooks in it are C++'s or part of it."""
    model = Tied()
    train(model, 1)
    torch._dynamo.config.compiled_autograd = True

    @torch.compile(backend="eager")
    def backward(loss):
        loss.backward()

    train(model, 3, backward)


compiled() if "compiled" in sys.argv else main()
