"""Ranks that end in awkward ways. `exits.py HOW...` runs each way in a forked child.

With `traced DIRECTORY` before the ways, each child records below that directory. Prints, for
each way, the exit status and what the child printed, as one JSON line.
"""

import atexit
import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor.parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.tracer.capture.inject import arm
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RunInfo


def start():
    torch.manual_seed(11)
    file = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    print("trained", flush=True)
    return model


def launched():
    """An all-reduce without a wait."""
    return dist.all_reduce(torch.ones(1 << 20), async_op=True)


def ways(how):  # noqa: PLR0912
    start()
    if how == "returns":
        return
    if how == "sys_exit":
        sys.exit(5)
    if how == "raises":
        raise RuntimeError("the job's own error")
    if how == "exit_in_thread":
        thread = threading.Thread(target=lambda: sys.exit(9))
        thread.start()
        thread.join()
    elif how == "raises_in_thread":
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()
    elif how == "pending":
        for _ in range(50):
            launched()
    elif how == "pending_kept":
        sys.kept = [launched() for _ in range(50)]
    elif how == "destroyed":
        dist.destroy_process_group()
    elif how == "at_exit":
        atexit.register(lambda: dist.all_reduce(torch.ones(3)))
        atexit.register(lambda: print("goodbye", flush=True))
    elif how == "daemon_thread":
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.05)
    elif how == "os_exit":
        os._exit(6)
    elif how == "abort":
        os.abort()
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "sigterm_handled":
        signal.signal(signal.SIGTERM, lambda n, f: sys.exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    elif how == "sigint":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    elif how == "handler_communicates":
        signal.signal(signal.SIGALRM, lambda n, f: dist.all_reduce(torch.ones(2)))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(500):
            dist.all_reduce(torch.ones(2))
        signal.setitimer(signal.ITIMER_REAL, 0)
    elif how in ("out_of_memory", "out_of_memory_unwritten"):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
        hoard = []
        while True:
            hoard.append(bytearray(1 << 20))
            dist.all_reduce(torch.ones(2))
    elif how == "forks":
        pid = os.fork()
        if pid == 0:
            for _ in range(200):
                nn.Linear(2, 2)(torch.ones(1, 2))
            os._exit(0)  # Gloo's threads are not in this process; its end would wait for them
        assert os.waitpid(pid, 0)[1] == 0
        pid = os.fork()
        if pid == 0:
            os._exit(4)
        assert os.waitpid(pid, 0)[1] >> 8 == 4
    elif how == "environment":
        print(sorted(n for n, h in handlers().items() if h), sys.path, flush=True)
        print(sys.excepthook is sys.__excepthook__, threading.excepthook.__module__, flush=True)
        print(sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), flush=True)
        print(torch.initial_seed(), torch.rand(1).item(), torch.is_grad_enabled(), flush=True)
    elif how == "vanished":
        directory = os.environ.get("EXITS_TRACE")
        if directory:
            os.rename(directory, directory + ".gone")
        for _ in range(100):
            dist.all_reduce(torch.ones(2))
        time.sleep(0.3)


def handlers():
    return {n: signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN) for n in range(1, 32)}


def forever():
    while True:
        dist.all_reduce(torch.ones(2))


def main():
    arguments = sys.argv[1:]
    base = None
    if arguments[0] == "traced":
        base, arguments = Path(arguments[1]), arguments[2:]
    torch.set_num_threads(1)
    for number, how in enumerate(arguments):
        output = tempfile.TemporaryFile()  # noqa: SIM115 - the child writes on
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            if base is not None:
                trace = base / f"{number}-{how}"
                trace.mkdir()
                write_run(trace, RunInfo())
                os.environ["EXITS_TRACE"] = str(trace)
                interval_s = 60 if how == "out_of_memory_unwritten" else 0.01
                arm(CaptureConfig(directory=trace, flush_interval_s=interval_s))
            ways(how)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
        print(json.dumps({"how": how, "status": status, "output": text}), flush=True)


if __name__ == "__main__":
    main()
