"""Communication by parallel dimension: names of groups, times, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.measures.dimensions import dimension_of
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.html_report import render as render_html
from ddltrace.analyzer.report.markdown_report import render_markdown
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.pages.communication_page import communication_page
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.trace.run_info import GroupInfo

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"


@pytest.mark.parametrize(
    ("dimension", "descriptions"),
    [
        (
            "data",
            "DATA_PARALLEL_GROUP DATA_PARALLEL_GROUP_WITH_CP DATA_PARALLEL_GROUP_WITH_CP_AG "
            "DATA_PARALLEL_GROUP_WITH_CP_GLOO INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP "
            "EXPERT_DATA_PARALLEL_GROUP mesh_dp mesh_dp_replicate mesh_dp_shard mesh_dp_shard_cp "
            "mesh_dp_cp mesh_dp_shard_mod_ep mesh_dp_shard_in_ep mesh_fsdp mesh_efsdp mesh_loss "
            "mesh_data_parallel mesh_replicate mesh_shard fsdp dp:0 DataParallelGroup",
        ),
        (
            "tensor",
            "TENSOR_MODEL_PARALLEL_GROUP EXPERT_TENSOR_PARALLEL_GROUP mesh_tp mesh_etp tp_0 "
            "mesh_tensor_parallel TensorParallel TP TP,mesh_tp",
        ),
        (
            "pipeline",
            "PIPELINE_MODEL_PARALLEL_GROUP EMBEDDING_GROUP POSITION_EMBEDDING_GROUP mesh_pp "
            "pipeline_1",
        ),
        (
            "expert",
            "EXPERT_MODEL_PARALLEL_GROUP EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP mesh_ep "
            "expert_parallel",
        ),
        ("context", "CONTEXT_PARALLEL_GROUP mesh_cp mesh_sp mesh_sequence_parallel ulysses"),
        (
            "unknown",
            "MODEL_PARALLEL_GROUP TENSOR_AND_DATA_PARALLEL_GROUP TENSOR_AND_CONTEXT_PARALLEL_GROUP "
            "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP "
            "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP mesh_tp_cp mesh_mp",
        ),
        (None, "default_pg undefined mesh_default mesh_dim_0 default_pg:split:1 ddltrace:data 7"),
    ],
)
def test_names_of_groups(dimension, descriptions):
    assert {text: dimension_of(text) for text in descriptions.split()} == dict.fromkeys(
        descriptions.split(), dimension
    )
    assert dimension_of("") is None


def grid(build: Any, steps: int = 6) -> Any:
    """Two ranks that communicate in every dimension in each step of 1000 us.

    Rank 1 comes 50 us later to the tensors' message. Compute is in [0, 300) and [450, 600).
    """
    built = build(2)
    names = {"0": "default_pg", "1": "mesh_tp", "2": "CONTEXT_PARALLEL_GROUP", "3": "mesh_dp_shard"}
    built.groups = [GroupInfo(name, text, "gloo", (0, 1)) for name, text in names.items()]
    weight = built.tensor("weight", 16)
    for rank in range(2):
        one = built[rank]
        for number in range(steps):
            at, seq = 1000.0 * number, {"seq": number, "step": number}
            one.whole_step(number, at, at + 1000)
            for begin, end in ((0, 300), (450, 600)):
                one.add("phase", at + begin, at + end, name="forward", step=number, phase="forward")
            late = 50 * rank
            one.message("all_reduce", at + 250 + late, at + 400, group="1", bytes=8, **seq)
            one.message("all_gather", at + 350, at + 500, group="2", bytes=4, **seq)
            one.message(
                "all_reduce", at + 600, at + 700, group="0", bytes=16, tensors=[weight], **seq
            )
            one.message("reduce_scatter", at + 650, at + 750, group="3", bytes=32, **seq)
            one.message(
                "all_reduce",
                at + 800,
                at + 810,
                group="0",
                bytes=2,
                **{**seq, "seq": steps + number},
            )
    return built


EXPECTED = {
    # exposed, wait, transfer, messages, bytes, groups
    "tensor": (100, 25, 100, 1, 8, ("mesh_tp",)),
    "context": (100, 0, 150, 1, 4, ("CONTEXT_PARALLEL_GROUP",)),
    # In flight at the same time for 50 us, which the dimension has once.
    "data": (150, 0, 150, 2, 48, ("default_pg", "mesh_dp_shard")),
    "unknown": (10, 0, 10, 1, 2, ("default_pg",)),
}


def by_dimension(analysis: Any) -> dict[str, Any]:
    return {
        row.dimension: (
            *map(pytest.approx, (row.exposed_us, row.wait_us, row.transfer_us, row.messages)),
            row.bytes,
            row.groups,
        )
        for row in analysis.dimensions
    }


def test_each_dimension_has_the_time_of_its_messages(build):
    trace = grid(build).trace()
    analysis = trace.analyze()
    assert by_dimension(analysis) == EXPECTED
    assert analysis.dimensions[0].dimension == "data"
    for row in analysis.dimensions:
        assert row.comm_us == pytest.approx(row.wait_us + row.transfer_us)
    # Tensor and context share 50 us: the rows sum to more than the ranks' communication.
    summary = analysis.summary
    exposed = summary.exposed_comm_share * summary.rank_step_us.mean
    assert sum(row.exposed_us for row in analysis.dimensions) == pytest.approx(exposed + 50)
    sent = sum(row.bytes for row in analysis.dimensions)
    assert sent == pytest.approx(np.mean([row.bytes_sent for row in analysis.ranks]) / 6)
    (json_row,) = [row for row in analysis.to_json()["dimensions"] if row["dimension"] == "tensor"]
    assert json_row["exposed_us"] == pytest.approx(100)


def test_reports_show_dimensions_only_if_there_is_something_to_compare(build):
    trace = grid(build).trace()
    analyzed = analyze_in_full(trace)
    page = communication_page(Workspace([trace]).get(0), Address.parse(""))
    text, markdown = render_report(analyzed.analysis), render_markdown(analyzed.analysis)
    for shown in (text, markdown, render_html(analyzed, trace), str(page)):
        assert "CONTEXT_PARALLEL_GROUP" in shown.replace("\\_", "_")
    (line,) = [line for line in text.splitlines() if line.endswith("mesh_tp")]
    assert " ".join(line.split()) == "tensor 100 µs 25.0 µs 100 µs 1 8 B mesh_tp"
    (line,) = [line for line in markdown.splitlines() if "tp |" in line]
    assert line.split(" | ")[1:4] == ["100 µs", "25.0 µs", "100 µs"]
    sample = open_trace(SAMPLE).analyze()
    assert [row.dimension for row in sample.dimensions] == ["data"]
    assert "dimension" not in render_report(sample) + render_markdown(sample)


def test_what_the_trace_does_not_say_is_null(build):
    built = build(2)
    built.groups = [GroupInfo("0", "mesh_tp", "gloo", (0, 1)), GroupInfo("1", "mesh_pp", "", ())]
    for rank in range(2):
        # No compute, no end of one message, no size of the other.
        built[rank].message("all_reduce", 100, None, seq=0, bytes=8)
        built[rank].message("all_gather", 200 + rank, 300, seq=0, group="1")
    tensor, pipeline = sorted(
        built.trace().analyze().dimensions, key=lambda row: row.dimension, reverse=True
    )
    assert (tensor.dimension, tensor.messages, tensor.bytes) == ("tensor", 1, 8)
    assert {tensor.exposed_us, tensor.wait_us, tensor.transfer_us, tensor.comm_us} == {None}
    assert (pipeline.dimension, pipeline.bytes, pipeline.exposed_us) == ("pipeline", None, None)
    assert (pipeline.wait_us, pipeline.transfer_us) == (0.5, 99)


def test_dimensions_of_a_profile_without_steps(tmp_path: Path):
    """Kineto files have descriptions, and no parameters of messages."""
    kernels = [
        ("0", "default_pg", 0, 100),
        ("1", "TENSOR_MODEL_PARALLEL_GROUP", 50, 100),
        ("2", "EXPERT_MODEL_PARALLEL_GROUP", 200, 100),
    ]
    for rank in range(2):
        events = [
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "pid": 0,
                "tid": 20 + number,
                "ts": at,
                "dur": took,
                "args": {
                    "Collective name": "allreduce",
                    "In msg nelems": 4,
                    "Out msg nelems": 4,
                    "dtype": "Float",
                    "Process Group Name": name,
                    "Process Group Description": description,
                    "Process Group Ranks": "[0, 1]",
                    "Seq": 1,
                    "stream": 20 + number,
                },
            }
            for number, (name, description, at, took) in enumerate(kernels)
        ]
        compute = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
        events.append({**compute, "ts": 0, "dur": 250, "args": {"stream": 7}})
        text = {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(text))
    rows = {row.dimension: row for row in open_trace(tmp_path).analyze().dimensions}
    expected = {"expert": (50, 100, 16), "tensor": (0, 100, 16), "unknown": (0, 100, 16)}
    # The clocks of the ranks are fitted, which changes some nanoseconds.
    assert {name: (row.exposed_us, row.comm_us, row.bytes) for name, row in rows.items()} == {
        name: pytest.approx(values, abs=0.1) for name, values in expected.items()
    }
