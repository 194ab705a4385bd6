"""Two ranks that communicate by other libraries, which stand-ins replace here.

The stand-ins have the signatures of the libraries; the operators of symmetric memory are PyTorch's,
with kernels for the CPU.
"""

from __future__ import annotations

import sys
import types
from enum import Enum

import torch.distributed as dist


class Loader:
    """Imports the stand-ins, so that whoever waits for their import is told."""

    def __init__(self, modules: dict[str, dict[str, object]]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        del path, target
        if not any(known == name or known.startswith(f"{name}.") for known in self._modules):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> None:
        del spec

    def exec_module(self, made: types.ModuleType) -> None:
        vars(made).update(self._modules.get(made.__name__, {}))


class Buffer:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def dispatch(self, x, handle=None, topk_idx=None, async_finish=False):
        return x, None, None, [], (), None

    def combine(self, x, handle, topk_weights=None, async_finish=False):
        return x, None, None


class CustomAllreduce:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, inp, *, out=None, registered=False):
        out = inp.clone()
        dist.all_reduce(out, group=self.group) if registered else None
        return out


def trtllm_allreduce_fusion(allreduce_in, world_size, world_rank, token_num, hidden_dim):
    return None


class CommOverlapType(Enum):
    AG = 0
    RS = 1


def general_gemm(  # noqa: PLR0917
    A, B, workspace, ub=None, ub_type=None, extra_output=None, bulk_overlap=False
):
    return A @ B


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    sys.meta_path.append(
        Loader(
            {
                "deep_ep.buffer": {"Buffer": Buffer},
                "vllm.distributed.device_communicators.custom_all_reduce": {
                    "CustomAllreduce": CustomAllreduce
                },
                "flashinfer.comm.trtllm_ar": {"trtllm_allreduce_fusion": trtllm_allreduce_fusion},
                "transformer_engine.pytorch.cpp_extensions.gemm": {"general_gemm": general_gemm},
            }
        )
    )
    import torch.distributed._symmetric_memory
    from deep_ep.buffer import Buffer as PatchedBuffer
    from flashinfer.comm.trtllm_ar import trtllm_allreduce_fusion as fusion
    from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm as gemm
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce as Custom

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce", lambda data, op, name: data + 1, "CPU")
    library.impl("multimem_all_gather_out", lambda data, name, out: out, "CPU")
    name = world.group_name
    data, matrix = torch.ones(100), torch.ones(8, 8)
    print(f"{torch.ops.symm_mem.one_shot_all_reduce(data, 'sum', name).sum().item()}\n", end="")
    torch.ops.symm_mem.multimem_all_gather_out(data, name, torch.empty(200))
    torch.ops.symm_mem.one_shot_all_reduce(data.to("meta"), "sum", name)
    buffer = PatchedBuffer(world)
    buffer.dispatch((torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4)), topk_idx=None)
    buffer.combine(x=torch.ones(4, 16, dtype=torch.bfloat16), handle=(), async_finish=True)
    custom = Custom(world)
    custom.all_reduce(data)
    custom.all_reduce(data, registered=True)  # falls back
    fusion(allreduce_in=data, world_size=2, world_rank=0, token_num=1, hidden_dim=100)
    gemm(matrix, matrix, None)
    gemm(matrix, matrix, None, ub=object(), ub_type=CommOverlapType.AG)
    gemm(matrix, matrix, None, object(), CommOverlapType.RS, extra_output=matrix[:4])
    try:
        fusion(data)
    except TypeError as error:
        print(f"refused: {'missing' in str(error)}\n", end="")
    # Without it, PyTorch's own threads now and then end the process with a signal.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
