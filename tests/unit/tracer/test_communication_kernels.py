"""Kernels that communicate, by the names that public libraries give them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.importers.kineto.decoded_messages import kernel_op
from ddltrace.cli import cli
from ddltrace.tracer.trace.communication_kernels import (
    ENVIRONMENT,
    is_message_kernel,
    is_suspect_kernel,
)

KERNELS = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclKernel_Reduce_RING_LL_Sum_half(ncclWorkElem)": "reduce",
    "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": "rcclGenericKernel",
    "hcom_allReduce__503_0_1": "all_reduce",
    "oneccl_allreduce_pcie<half, Rt64_128_PCIE, RingTransmit>": "all_reduce",
    "oneccl_reduce_base<float, 2, 16, 1, 1, 2>": "oneccl_reduce_base",
    "AllreduceMediumKernel_GlobalSync<float>": "all_reduce",
    "void mscclpp::collective::allreduceNvlsPacket<float>(float*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(long)": "all_reduce",
    "void <unnamed>::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(int)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)": "all_gather",
    "allToAllV(void*, void*, long*, int)": "all_to_all",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void sglang::cross_device_reduce_2stage<__half, 8>(sglang::RankData*)": "all_reduce",
    "void aiter::reduce_scatter_cross_device_store<bf16, 8>(aiter::RankData*)": "reduce_scatter",
    "_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataE": "reduce_scatter",
    "void aiter::allreduce_fusion_kernel_2stage<bf16, 8, 4>(aiter::RankData*)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half>>(int)": "all_reduce",
    "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__half, 4u>(int)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<float, 8, true>(Params)": "all_reduce",
    "void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<half, e4m3, 8>(P)": (
        "all_reduce"
    ),
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<"
    "(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, half, 8>(P)": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8>(int)": "all_reduce",
    "void moeAllToAllKernel<true>(Params)": "all_to_all",
    "void userbuffers_fp16_sum_inplace_gpu_rr<8>(int, int)": "all_reduce",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int)": "reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int)": "all_gather",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": "kuserbuffers_pushsend",
    "void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*)": "dispatch",
    "void dpsk::ep::internode::cached_notify<false>(int, int, int)": "cached_notify",
    "void deep_ep::internode_ll::combine<false, 7168>(void*)": "combine",
    "void deep_ep::intranode::notify_dispatch<8>(int const*)": "notify_dispatch",
    "void deep_ep::elastic::hybrid_dispatch_impl<true>(int)": "hybrid_dispatch_impl",
    "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(Args)": "EpDispatchIntraNodeKernel",
    "EpCombineLowLatencyAsyncSendCopy_bf16": "EpCombineLowLatencyAsyncSendCopy_bf16",
    "void OneShotAllGatherSdmaKernel<float>(int)": "all_gather",
    "nvshmemi_proxy_quiet_entrypoint(int)": "nvshmemi_proxy_quiet_entrypoint",
    "void barrier_on_stream_kernel_threadgroup<1>(int)": "barrier",
}
OTHERS = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
    "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*)",
    "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>(int)",
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64>>(int)",
    "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas",
    "triton_red_fused__to_copy_all_mean_0",
    "void cub::DeviceScanKernel<int>(int)",
    "void at::native::scatter_gather_elementwise_kernel<128, 8>(int)",
]


@pytest.mark.parametrize(("name", "op"), KERNELS.items())
def test_known_libraries(name: str, op: str) -> None:
    assert is_message_kernel(name)
    assert not is_suspect_kernel(name)
    assert kernel_op(name) == op


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_that_compute(name: str) -> None:
    assert not is_message_kernel(name)
    assert not is_suspect_kernel(name)


@pytest.mark.parametrize(
    "name", ["my_allreduce_kernel<float>", "void x::moe_dispatch_kernel<1>(int)", "shmem_put_all"]
)
def test_suspects(name: str) -> None:
    assert is_suspect_kernel(name)
    assert not is_message_kernel(name)


def _profile(path: Path, kernel: str) -> Path:
    """One step of 10 ms with 4 ms of a kernel, 2 ms of them beside 5 ms of another one."""
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, ts: int, dur: int, tid: int, **args: int) -> None:
        events.append(
            {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    for step in range(3):
        begin = step * 10_000
        add(f"ProfilerStep#{step}", "user_annotation", begin, 10_000, 1)
        add("cudaLaunchKernel", "cuda_runtime", begin + 10, 5, 1, correlation=2 * step + 1)
        add("gemm", "kernel", begin + 1000, 5000, 7, stream=7, correlation=2 * step + 1)
        add("cudaLaunchKernel", "cuda_runtime", begin + 20, 5, 1, correlation=2 * step + 2)
        add(kernel, "kernel", begin + 4000, 4000, 8, stream=8, correlation=2 * step + 2)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def _analysis(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["analyze", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_suspect_is_listed_until_the_user_names_it(tmp_path: Path) -> None:
    kernel = "my_allreduce_kernel<float>"
    file = str(_profile(tmp_path / "rank0.json", kernel))
    unknown = _analysis(file)
    assert unknown["trace"]["suspected_communication"] == {kernel: 3}
    assert unknown["ranks"][0]["comm_us"] == 0
    assert not any("no faster message" in finding["advice"] for finding in unknown["findings"])
    known = _analysis(file, "--communication-kernels", "^my_all")
    assert known["trace"]["suspected_communication"] == {}
    assert known["ranks"][0]["comm_us"] == 12_000
    assert known["ranks"][0]["overlap_us"] == 6000
    assert known["collectives"][0]["op"] == "all_reduce"
    assert ENVIRONMENT not in os.environ


def test_a_wrong_pattern_is_an_error(tmp_path: Path) -> None:
    file = str(_profile(tmp_path / "rank0.json", "gemm2"))
    result = CliRunner().invoke(cli, ["analyze", file, "--communication-kernels", "("])
    assert result.exit_code != 0
    assert "is not a regular expression" in str(result.exception) + result.output


def test_nothing_is_said_of_messages_where_none_were_recorded(tmp_path: Path) -> None:
    found = _analysis(str(_profile(tmp_path / "rank0.json", "softmax")))
    assert found["findings"]
    assert not any("no faster message" in finding["advice"] for finding in found["findings"])
