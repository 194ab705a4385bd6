"""One rank exits with a status of its own."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if len(sys.argv) > 1:
    # Otherwise the other rank may be aborted by Gloo, at the end of the interpreter.
    dist.destroy_process_group()
    sys.exit(int(sys.argv[1]))
