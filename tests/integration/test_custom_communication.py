"""Communication by other libraries: tests/jobs/custom_communication.py, traced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.jobs import JOBS, on_ranks, run, traced
from support.traces import read_last_rows

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.interpose import operators
from ddltrace.tracer.interpose.c10d.custom_communication import LIBRARIES
from ddltrace.tracer.trace.run_reader import read_run

JOB = JOBS / "custom_communication.py"


def test_calls_of_other_libraries_are_messages(tmp_path: Path) -> None:
    plain = run(on_ranks(JOB), cwd=tmp_path)
    trace = tmp_path / "trace"
    done = run(traced(trace, on_ranks(JOB)), cwd=tmp_path)
    assert plain.status == done.status == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(plain.stdout.split())
    assert plain.stdout.count("refused: True") == plain.stdout.count("200.0") == 2
    for info in read_run(trace).ranks:
        assert info.errors == []
        table, _ = read_last_rows(trace, info.segment)
        rows = [row for row in table.to_pylist() if row["kind"] == "message"]
        group, alone = "0", f" of rank {info.rank}"
        found = [
            (r["name"], r["op"], r["group"], r["seq"], r["bytes"], r["out_bytes"], r["clock"])
            for r in sorted(rows, key=lambda row: row["enqueue_ns"])
        ]
        flashinfer = f"FlashInfer{alone}"
        user_buffers = f"Transformer Engine user buffers{alone}"
        one_shot, gather = "symm_mem.one_shot_all_reduce", "symm_mem.multimem_all_gather_out"
        seams = [row["seam"] for row in sorted(rows, key=lambda row: row["enqueue_ns"])]
        assert [found[i][0] for i, seam in enumerate(seams) if seam != "library"] == ["all_reduce"]
        assert found == [
            (one_shot, "all_reduce", group, 0, 400, 400, "host"),
            (gather, "all_gather", group, 1, 400, 800, "host"),
            ("Buffer.dispatch", "all_to_all", group, 2, 144, None, "host"),
            ("Buffer.combine", "all_to_all", group, 3, 128, None, None),
            ("CustomAllreduce.all_reduce", "all_reduce", group, 4, 400, 400, "host"),
            ("all_reduce", "all_reduce", group, 5, 400, 400, found[5][-1]),
            ("trtllm_allreduce_fusion", "all_reduce", flashinfer, None, 400, 400, "host"),
            ("general_gemm", "all_gather", user_buffers, None, None, 256, "host"),
            ("general_gemm", "reduce_scatter", user_buffers, None, None, 128, "host"),
        ]
    analysis = open_trace(trace).analyze()
    assert {row.op for row in analysis.collectives} >= {"all_reduce", "all_to_all"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_table_names_what_it_patches(library: object) -> None:
    for call in library.calls:  # type: ignore[attr-defined]
        assert call.inputs or call.outputs or "fused" in call.name
        if call.name.startswith("symm_mem::"):
            import torch

            packet = getattr(torch.ops.symm_mem, call.name.split("::")[1], None)
            if packet is None:
                continue  # of another version
            names = {argument.name for argument in packet.default._schema.arguments}
            assert {call.inputs, call.outputs, call.group} - {None} <= names, call


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void gemm_kernel(float*)", "kernel"),
        ("void cross_device_reduce_1stage<float, 2>(RankData*)", None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", None),
    ],
)
def test_kernels_that_communicate_are_no_computation(name: str, kind: str | None) -> None:
    event = SimpleNamespace(
        device_type=lambda: "DeviceType.CUDA",
        name=lambda: name,
        is_user_annotation=lambda: False,
        device_resource_id=lambda: 7,
    )
    assert operators._kind_and_lane(event)[0] == kind
