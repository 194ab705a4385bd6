"""Uses parameters between steps and forward passes, by what it has kept of them before training.

Usage: kept_parameters.py OUTPUT PATH... Every rank writes what it has read in each path, and the
final weights, to its own file.
"""

import copy
import io
import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 5


class Job:
    """A model, what the job has kept of it, and what it reads."""

    def __init__(self, path):
        torch.manual_seed(len(path))
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
        )
        self.kept = list(self.model.parameters())
        self.views = [p.detach() for p in self.kept]
        if path not in ("views", "numpy", "state dict"):
            self.views = []
        if path == "state dict":
            self.views = list(self.model.state_dict().values())
        if path == "numpy":
            self.views = [view.numpy() for view in self.views]
        self.shadow = [p.detach().clone() for p in self.kept]
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.data = torch.Generator().manual_seed(dist.get_rank())
        self.read = []

    def train(self, use):
        for step in range(STEPS):
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
            self.ddp(torch.randn(4, 3, generator=self.data)).square().mean().backward()
            self.optimizer.step()
            use(self, step)


def total(tensors):
    return float(sum(float(tensor.sum()) for tensor in tensors))


def moving_average(job, step):
    del step
    for mine, parameter in zip(job.shadow, job.kept, strict=True):
        mine.lerp_(parameter.detach(), 0.5)
    job.read.append(total(job.shadow))


def foreach_average(job, step):
    del step
    torch._foreach_lerp_(job.shadow, job.kept, 0.5)
    job.read.append(total(job.shadow))


moving_average, foreach_average = map(torch.no_grad(), (moving_average, foreach_average))


def averaged_model(job, step):
    del step
    job.averaged.update_parameters(job.model)
    job.read.append(total(p.detach() for p in job.averaged.parameters()))


@torch.no_grad()
def clipping(job, step):
    del step
    for parameter in job.kept:
        parameter.clamp_(-0.3, 0.3)


def clipping_data(job, step):
    del step
    for parameter in job.kept:
        parameter.data.clamp_(-0.3, 0.3)


def norms(job, step):
    del step
    job.read.append(float(nn.utils.get_total_norm([p.detach() for p in job.kept])))
    job.read.append(float(nn.utils.parameters_to_vector(job.kept).norm()))
    job.read.append(total(torch._foreach_norm(job.kept)))


def one_of_them(job, step):
    job.read.append(job.kept[step % len(job.kept)].flatten()[0].item())


def numbers(job, step):
    del step
    job.read.append(job.kept[0].tolist())
    job.read.append([[float(value) for value in row] for row in job.kept[2]])


def saved(job, step):
    del step
    file = io.BytesIO()
    torch.save(job.kept, file)
    file.seek(0)
    job.read.append(total(p.detach() for p in torch.load(file)))


def copied(job, step):
    del step
    for each in (copy.deepcopy(job.kept), [copy.copy(p) for p in job.kept]):
        assert all(type(p) is nn.Parameter for p in each)
        job.read.append(total(p.detach() for p in each))


def gradients(job, step):
    del step
    job.read.append(total(p.grad for p in job.kept))


def views(job, step):
    del step
    job.read.append(total(job.views))


def in_a_thread(job, step):
    thread = threading.Thread(target=moving_average, args=(job, step))
    thread.start()
    thread.join()


@torch.no_grad()
def evaluation(job, step):
    del step
    inputs = torch.ones(1, 3)
    job.read.append(job.model(inputs).tolist())
    job.read.append(job.ddp(inputs).tolist())
    weight, bias = job.kept[:2]
    job.read.append(nn.functional.linear(inputs, weight, bias).tolist())


def swapped(job, step):
    """Trains on from the moving average, as Lookahead does."""
    moving_average(job, step)
    with torch.no_grad():
        torch._foreach_copy_(job.kept, job.shadow)


def second_step(job, step):
    if step % 2:
        job.optimizer.step()


def penalty(job, step):
    del step
    loss = sum(p.square().sum() for p in job.kept)
    job.read.append([float(g.sum()) for g in torch.autograd.grad(loss, job.kept)])


def reset(job, step):
    if step == 2:
        torch.manual_seed(1)
        for parameter in job.kept:
            nn.init.normal_(parameter)


def replaced_data(job, step):
    if step == 1:
        for parameter in job.kept:
            parameter.data = parameter.data * 0.5


PATHS = {
    "moving average": moving_average,
    "foreach": foreach_average,
    "averaged model": averaged_model,
    "clipping": clipping,
    "clipping data": clipping_data,
    "norms": norms,
    "one of them": one_of_them,
    "numbers": numbers,
    "saved": saved,
    "copied": copied,
    "gradients": gradients,
    "views": views,
    "numpy": views,
    "state dict": views,
    "in a thread": in_a_thread,
    "evaluation": evaluation,
    "swapped": swapped,
    "second step": second_step,
    "penalty": penalty,
    "reset": reset,
    "replaced data": replaced_data,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Path(f"{sys.argv[1]}.{dist.get_rank()}").open("w") as found:
        for path in sys.argv[2:] or PATHS:
            job = Job(path)
            job.train(PATHS[path])
            weights = [p.flatten().tolist() for p in job.kept]
            found.write(json.dumps([path, job.read, weights]) + "\n")
    dist.destroy_process_group()
