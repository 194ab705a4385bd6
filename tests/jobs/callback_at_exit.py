"""A job of two ranks that ends while a thread of Gloo still runs a callback of a future."""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
began = threading.Event()


def compute(future):
    began.set()
    # Until the tracer has written its trace, and a little longer.
    while any(thread.name == "ddltrace-writer" for thread in threading.enumerate()):
        pass
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass


# Rank 1 takes part only when rank 0 has added its callback, which the thread of Gloo then runs.
if dist.get_rank() == 1:
    store.wait(["added"])
work = dist.all_reduce(torch.ones(4), async_op=True)
if dist.get_rank() == 0:
    work.get_future().add_done_callback(compute)
    store.set("added", "yes")
    began.wait()
else:
    work.wait()
