"""Prints the names of all threads, and which of the tracer's threads evaluated a string."""

import json
import sys
import threading

EVALUATED = []


def note_evaluation(event, arguments):
    if event != "exec" or not threading.current_thread().name.startswith("ddltrace-"):
        return
    # Imported modules are evaluated too, but in another way: their code comes from a file.
    if arguments[0].co_filename.startswith("<"):
        EVALUATED.append((threading.current_thread().name, arguments[0].co_filename))


sys.addaudithook(note_evaluation)

import time  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.15)
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps({"evaluated": EVALUATED, "threads": threads}))
dist.destroy_process_group()
