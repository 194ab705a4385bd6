"""Makes all-reduces with Gloo and calls the profiler plugin for each of them, as NCCL would."""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p

import torch
import torch.distributed as dist


class Coll(ctypes.Structure):
    """A collective in version 5 of the interface."""

    _fields_ = (
        ("type", c_uint64),
        ("parent", c_void_p),
        ("rank", c_int),
        ("sequence", c_uint64),
        ("func", c_char_p),
        ("send_buffer", c_void_p),
        ("recv_buffer", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("channels", c_uint8),
        ("warps", c_uint8),
        ("algo", c_char_p),
        ("proto", c_char_p),
        ("group", c_void_p),
        ("rest", c_uint64 * 8),
    )


class Profiler(ctypes.Structure):
    """The plugin's functions."""

    _fields_ = (
        ("name", c_char_p),
        (
            "init",
            ctypes.CFUNCTYPE(
                c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, c_int, c_int, c_int,
                c_void_p,
            ),
        ),
        ("start", ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(Coll))),
        ("stop", ctypes.CFUNCTYPE(c_int, c_void_p)),
        ("record", c_void_p),
        ("finalize", ctypes.CFUNCTYPE(c_int, c_void_p)),
    )  # fmt: skip


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
library = ctypes.CDLL(os.environ["NCCL_PROFILER_PLUGIN"])
profiler = Profiler.in_dll(library, "ncclProfiler_v5")
context, mask = c_void_p(), c_int()
assert profiler.init(byref(context), 77, byref(mask), b"played", 1, size, rank, None) == 0
assert mask.value & 2
tensor = torch.ones(1000)
for number in range(20):
    dist.all_reduce(tensor)
    handle = c_void_p()
    event = Coll(
        type=2,
        rank=rank,
        sequence=number,
        func=b"AllReduce",
        send_buffer=tensor.data_ptr(),
        recv_buffer=tensor.data_ptr(),
        count=1000,
        datatype=b"ncclFloat32",
        channels=1,
        algo=b"RING",
        proto=b"LL",
    )
    assert profiler.start(context, byref(handle), byref(event)) == 0
    assert profiler.stop(handle) == 0
if rank == 0:
    assert profiler.finalize(context) == 0
dist.destroy_process_group()
