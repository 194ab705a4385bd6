"""Recognizes GPU kernels that communicate by their names.

NCCL is one library of many: a kernel counts as communication if a row of `LIBRARIES` describes its
name, or the user's pattern (``--communication-kernels``). Names that only resemble communication
are reported as suspects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, NamedTuple

from ddltrace.tracer.environment import environment_variable
from ddltrace.tracer.errors import UsageError

ENVIRONMENT: Final = "DDLTRACE_COMMUNICATION_KERNELS"
"""Environment variable with the user's pattern. Helper processes inherit it."""


SUSPECTS_LABEL: Final = "kernels_of_unknown_class"
"""The entry of a run's labels with suspects: name -> number of runs."""


class Library(NamedTuple):
    """Kernels of one library.

    Attributes:
        name: The library.
        pattern: Found in the qualified name of its kernels, without template and call arguments.
        source: The public file that defines or names them.
        op: Their operation; None if their names state it, or nothing does.
        speaks: Whether the names state any operation, as ``Reduce`` and ``SendRecv`` of NCCL.
    """

    name: str
    pattern: str
    source: str
    op: str | None = None
    speaks: bool = False


LIBRARIES: Final = (
    Library("NCCL, RCCL", r"\b(?:nccl|rccl)", "NVIDIA/nccl: src/device/common.h", speaks=True),
    Library("NCCL", r"\boneRankReduce\b", "NVIDIA/nccl: src/device/onerank.cu"),
    Library(
        "HCCL",
        r"\b(?:hccl|Hccl|hcom_|Hcom)",
        "Ascend/msprof-analyze: hcom_allReduce__*",
        speaks=True,
    ),
    Library("oneCCL", r"\boneccl", "uxlfoundation/oneCCL: src/coll/algorithms"),
    Library(
        "oneCCL",
        r"\b(?:All(?:reduce|gatherv?)|Reduce_?[sS]catter)_?(?:small_kernel|(?:Small|Medium|Large)"
        r"\w*Kernel)",
        "uxlfoundation/oneCCL: src/coll/algorithms/allreduce/sycl",
    ),
    Library(
        "MSCCL++",
        r"\bmscclpp|\b(?:allreduce(?:AllPairs|Fullmesh|Nvls\w*|Packet|RsAg\w*)|allgatherFullmesh)",
        "microsoft/mscclpp: src/ext/collectives",
    ),
    Library(
        "PyTorch symmetric memory",
        r"(?:multimem|one_shot|two_shot)_(?:one_shot_)?(?:all_reduce|all_gather|reduce_scatter)",
        "pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu",
    ),
    Library(
        "PyTorch symmetric memory",
        r"\b(?:lsa_)?(?:put|wait)_signal_kernel\b|symmetric_memory::barrier_kernel\b",
        "pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu",
    ),
    Library(
        "PyTorch symmetric memory",
        r"\b(?:exchangeSplitAndOffset|allToAllV)(?:_2d)?\b",
        "pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu",
    ),
    Library(
        "vLLM, SGLang, aiter",
        r"cross_device_reduce_[12]stage",
        "vllm-project/vllm: csrc/custom_all_reduce.cuh",
        op="all_reduce",
    ),
    Library(
        "QuickReduce",
        r"allreduce_prototype_(?:one|two)shot",
        "vllm-project/vllm: csrc/quickreduce/quick_reduce_impl.cuh",
    ),
    Library(
        "SGLang",
        r"all_reduce_(?:one_shot|two_shot|[12]shot)_(?:\w+_)?kernel",
        "sgl-project/sglang: sglang/jit_kernel (all_reduce_one_shot_push_kernel)",
    ),
    Library(
        "aiter",
        r"reduce_scatter_cross_device_store|\baiter::(?:allgather_|reduce_scatter_)"
        r"|\b(?:qknorm_)?allreduce_(?:fusion_kernel_[12]stage|mhc_post)|\b(?:ar|ag|rs)_gfx\d+_"
        r"|\bar_ll_gfx\d+",
        "ROCm/aiter: csrc/include/custom_all_reduce.cuh",
    ),
    Library(
        "TensorRT-LLM, FlashInfer",
        r"(?i:(?:one|two)_?shot_?(?:prenorm_)?all_?reduce)",
        "NVIDIA/TensorRT-LLM: cpp/tensorrt_llm/kernels/customAllReduceKernels.cu",
    ),
    Library(
        "TensorRT-LLM, FlashInfer",
        r"allreduce_fusion_kernel_(?:oneshot|twoshot)",
        "flashinfer-ai/flashinfer: include/flashinfer/comm/trtllm_allreduce_fusion.cuh",
    ),
    Library(
        "TensorRT-LLM, FlashInfer",
        r"\bmoeAllToAllKernel\b|\bmoeA2A\w*(?:Dispatch|Combine)Kernel\b",
        "flashinfer-ai/flashinfer: csrc/nv_internal/tensorrt_llm/kernels/communicationKernels",
    ),
    Library(
        "FlashInfer",
        r"\b(?:fused_)?(?:allreduce|allgather|reducescatter)(?:_allreduce|_allgather)?_kernel\b"
        r"|\bulysses_a2a_kernel\b|\bipc_\w*push_param_kernel\b",
        "flashinfer-ai/flashinfer: include/flashinfer/comm",
    ),
    *(
        Library(
            "Transformer Engine",
            pattern,
            "NVIDIA/TransformerEngine: transformer_engine/common/comm_gemm_overlap/userbuffers",
            op=op,
        )
        for pattern, op in (
            (r"\buserbuffers_\w+_ag\b", "all_gather"),
            (r"\buserbuffers_\w+_rs(?:_|\b)", "reduce_scatter"),
            (r"\buserbuffers_\w+_sum_", "all_reduce"),
            (r"\bkuserbuffers_", None),
        )
    ),
    Library(
        "DeepEP",
        r"\b(?:intranode|internode(?:_ll)?)::\w",
        "deepseek-ai/DeepEP: csrc/kernels/legacy",
    ),
    Library(
        "DeepEP",
        r"\bdeep_ep::\w*(?:::\w+)*(?:dispatch|combine|barrier|engram_fetch|pp_send|pp_recv)"
        r"(?:_wait)?_impl\b",
        "deepseek-ai/DeepEP: deep_ep/include/deep_ep/impls",
    ),
    Library(
        "DeepEP hybrid",
        r"\bhybrid_ep::(?:dispatch|combine|device_sync)_kernel\b",
        "deepseek-ai/DeepEP: branch hybrid-ep",
    ),
    Library(
        "mori",
        r"\bEp(?:Dispatch|Combine)(?!CopyToStaging)\w",
        "ROCm/mori: src/ops/dispatch_combine",
    ),
    Library(
        "mori",
        r"\b(?:OneShot|ReduceScatter|AllGather|SdmaReduceScatter)(?!Local)\w*Kernel"
        r"|\b(?:mori_)?_?shmem_barrier",
        "ROCm/mori: include/mori/collective",
    ),
    Library(
        "NVSHMEM",
        r"\b(?:nvshmem|rocshmem|ishmem)|\b(?:alltoall|barrier|broadcast|fcollect|rdxn|"
        r"reducescatter|sync)_on_stream_kernel",
        "NVIDIA/nvshmem: src/include/internal/non_abi",
    ),
)

_ANYWHERE: Final = ("ncclKernel", "ncclDevKernel")
"""RCCL's generic kernel has these in the type of its argument."""

_SUSPICIOUS: Final = re.compile(
    r"nccl|shmem|multimem|allreduce|allgather|reducescatter|alltoall|all2all"
    r"|crossdevice|oneshot|twoshot|userbuffer|(?:moe|ep|token)(?:dispatch|combine)"
    r"|dispatchkernel|sendrecv|peertopeer|remotecopy"
)
_RETURN_TYPE: Final = re.compile(r"(?:static |__global__ )*void ")
_ANONYMOUS: Final = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)::")
_MANGLED: Final = re.compile(r"_Z[NLK]*(?=\d)")
_LENGTH: Final = re.compile(r"\d{1,3}")


def qualified_name(name: str) -> str:
    """The name of a kernel with its namespaces, without template and call arguments.

    A mangled name, such as ``_ZN5aiter9allgatherIfEEvPT_``, is a row of lengths and parts.
    """
    plain = _ANONYMOUS.sub("", _RETURN_TYPE.sub("", name))
    mangled = _MANGLED.search(plain)
    if mangled is None:
        return plain.partition("(")[0].partition("<")[0]
    parts, end = [], mangled.end()
    while (length := _LENGTH.match(plain, end)) is not None:
        end = length.end() + int(length[0])
        parts.append(plain[length.end() : end])
    return "::".join(parts)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Library], ...]:
    # Compiled when a kernel is seen: commands load this module for traces without any, too.
    return tuple((re.compile(library.pattern), library) for library in LIBRARIES)


def library_of(name: str) -> Library | None:
    """The library that has a kernel of that name."""
    qualified = qualified_name(name)
    found = (library for pattern, library in _patterns() if pattern.search(qualified))
    return next(found, LIBRARIES[0] if any(word in name for word in _ANYWHERE) else None)


def is_message_kernel(name: str) -> bool:
    """Whether a GPU kernel of that name belongs to a known library, or is one of the user's."""
    if library_of(name) is not None:
        return True
    text = os.environ.get(ENVIRONMENT)
    return bool(text) and _compiled(text or "").search(name) is not None


def is_suspect_kernel(name: str) -> bool:
    """Whether a kernel's name suggests communication, but belongs to no known library."""
    plain = qualified_name(name).lower().replace("_", "")
    return _SUSPICIOUS.search(plain) is not None and not is_message_kernel(name)


@cache
def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{text!r} is not a regular expression: {error}") from error


@contextmanager
def also_known(pattern: str | None) -> Iterator[None]:
    """Adds the user's kernels for a `with` block, here and in processes that are started in it.

    Args:
        pattern: A regular expression; None keeps that of the environment.

    Raises:
        UsageError: It is not a regular expression.
    """
    former = os.environ.get(ENVIRONMENT)
    if pattern is None or pattern == former:
        if former:
            _compiled(former)
        yield
        return
    _compiled(pattern)
    with environment_variable(ENVIRONMENT, pattern):
        yield
