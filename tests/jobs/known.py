"""DDP with enough steps that its messages are recorded without Python, in several ways."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.tracer.capture.session import current_session
from ddltrace.tracer.native.layout import CONTROL

LAUNCHED = CONTROL["launched"]
WAY, STEPS = sys.argv[1], int(sys.argv[2])


def build(width):
    """A model with four gradients in three buckets or so, and buffers of two types."""
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    # Gradients are views of the buckets: some have one's memory, all of it.
    return DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def train(models, optimizer, step):
    optimizer.zero_grad()
    output = sum(model(torch.randn(4, 8)).square().mean() for model in models)
    if WAY == "stops" and step == STEPS - 1:
        stop_for_good()
    output.backward()
    optimizer.step()
    return output.item()


def keep_full(session, step):
    """Nobody takes anything out of the ring, until it is full and far beyond."""
    if step == 20:
        session._writer.pause()
    elif step == STEPS - 200:
        session._writer.resume()
        while session.known._taken < session.known._control[LAUNCHED]:
            time.sleep(0.01)


def stop_for_good():
    """One rank does not enter the last backward pass; the other is killed in it."""
    if dist.get_rank() == 1:
        time.sleep(8)
        os._exit(0)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()


def communicate(models, other, step):
    """What a job does besides: with the reducers' memory, and in the reducers' group."""
    for parameter in models[0].parameters():
        dist.all_reduce(parameter.grad, async_op=True).wait()
    if step % 3 == 0:
        dist.barrier()
        dist.broadcast(torch.ones(2), src=1)
    if step == 25:  # what was known of groups may be wrong now
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    if step % 4 == 0:
        dist.all_reduce(torch.ones(5), group=other)
        with models[0].no_sync():
            models[0](torch.randn(4, 8)).sum().backward()


def fork(weights):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        weights.square().sum().backward()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main():
    sys.stdout.reconfigure(line_buffering=True)  # more than fits: it would be cut anywhere
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    other = dist.new_group()
    models = [build(16), build(24)] if WAY == "beside" else [build(16)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.01)
    session = current_session()
    known = None if session is None else session.known
    for step in range(STEPS):
        if WAY == "full" and known is not None:
            keep_full(session, step)
        sys.stdout.write(f"rank {dist.get_rank()} loss {train(models, optimizer, step).hex()}\n")
        if WAY == "beside":
            communicate(models, other, step)
            if step > 12:
                fork(torch.ones(4, requires_grad=True))
    if known is not None:
        sys.stdout.write(f"without Python {known._control[CONTROL['launched']]}\n")
    assert "pandas" not in sys.modules  # 40 MB that the job did not ask for
    dist.barrier()
    dist.destroy_process_group()


main()
