"""What the trace of a real two-rank job holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from support.jobs import JOBS, ONE_RANK, Done, at_once, on_ranks, run, torchrun, traced
from support.traces import read_last_rows

from ddltrace.tracer.trace.run_info import RunInfo
from ddltrace.tracer.trace.run_reader import read_run

CNN_STEPS = 6


def rows(trace: Path, run_info: RunInfo, rank: int) -> pd.DataFrame:
    """Events of a rank, the last row of each message only."""
    info = next(info for info in run_info.ranks if info.rank == rank)
    table, lost = read_last_rows(trace, info.segment)
    assert lost == 0
    frame = table.to_pandas()
    messages = frame[frame.kind == "message"].drop_duplicates("id", keep="last")
    return pd.concat([frame[frame.kind != "message"], messages])


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunInfo, Done, Done]:
    """The DDP CNN, traced and untraced."""
    cwd = tmp_path_factory.mktemp("cnn")
    command = torchrun("ddp_cnn.py", str(CNN_STEPS))
    plain, done = at_once(
        lambda: run(command, cwd=cwd), lambda: run(traced(cwd / "trace", command), cwd=cwd)
    )
    assert done.status == 0, done.stderr
    return cwd / "trace", read_run(cwd / "trace"), done, plain


def test_losses_are_identical_to_the_last_bit(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    _, _, done, plain = cnn
    assert len(plain.losses()) == 2 * CNN_STEPS
    assert done.losses() == plain.losses()


def test_the_trace_is_complete(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    trace, info, done, _ = cnn
    assert info.status == "complete"
    assert info.notes == []
    assert [(r.rank, r.status, r.errors, r.dropped) for r in info.ranks] == [
        (0, "complete", [], 0),
        (1, "complete", [], 0),
    ]
    assert f"ddltrace analyze {trace}" in done.stderr
    assert not list(trace.glob("*.arrows"))


def test_steps_are_those_that_the_optimizer_took(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    trace, info, _, _ = cnn
    for rank in (0, 1):
        frame = rows(trace, info, rank)
        steps = frame[frame.kind == "step"]
        assert sorted(steps.step) == list(range(CNN_STEPS))
        assert (frame[frame.kind == "phase"].groupby("name").size()["optimizer"]) == CNN_STEPS
        ends = steps.sort_values("step")
        assert (ends.start_ns.iloc[1:].to_numpy() == ends.end_ns.iloc[:-1].to_numpy()).all()


def test_every_gradient_travels_once_a_step(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    trace, info, _, _ = cnn
    tensors = info.ranks[0].tensors
    assert "blocks.0.conv1.weight" in {t.name for t in tensors}
    gradient_bytes = sum(t.bytes for t in tensors)
    for rank in (0, 1):
        frame = rows(trace, info, rank)
        sums = frame[(frame.kind == "message") & (frame.op == "all_reduce")]
        for _, buckets in sums.groupby("step"):
            assert buckets.bytes.sum() == gradient_bytes
            carried = sorted(t for ids in buckets.tensors for t in ids)
            assert carried == [t.id for t in tensors]
            for ids, size in zip(buckets.tensors, buckets.bytes, strict=True):
                assert sum(tensors[t].bytes for t in ids) == size
        ready = frame[(frame.kind == "gradient")].groupby("step").size()
        assert (ready == len(tensors)).all()
        assert len(ready) == CNN_STEPS


def test_messages_agree_on_both_ranks(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    trace, info, _, _ = cnn
    keys = []
    for rank in (0, 1):
        frame = rows(trace, info, rank)
        messages = frame[frame.kind == "message"]
        assert (messages.status == "ok").all()
        assert (messages.end_ns >= messages.start_ns).all()
        keys.append(messages[["group", "seq", "op", "bytes"]].sort_values(["group", "seq"]))
    assert keys[0].to_numpy().tolist() == keys[1].to_numpy().tolist()


def test_a_gradient_is_ready_before_its_message_starts(
    cnn: tuple[Path, RunInfo, Done, Done],
) -> None:
    trace, info, _, _ = cnn
    frame = rows(trace, info, 0)
    ready = frame[frame.kind == "gradient"].set_index(
        ["step", frame[frame.kind == "gradient"].tensors.str[0]]
    )
    sums = frame[(frame.kind == "message") & (frame.op == "all_reduce")]
    for _, message in sums.iterrows():
        for tensor in message.tensors:
            assert ready.loc[(message.step, tensor)].start_ns <= message.start_ns


def test_layers_nest_in_their_forward_and_carry_their_names(
    cnn: tuple[Path, RunInfo, Done, Done],
) -> None:
    trace, info, _, _ = cnn
    frame = rows(trace, info, 0)
    layers = frame[(frame.kind == "layer") & (frame.step == 2)]
    assert {"stem", "blocks", "blocks.1", "blocks.1.bn2", "hidden", "head"} <= set(layers.name)
    forward = frame[(frame.kind == "phase") & (frame.name == "forward") & (frame.step == 2)]
    assert len(forward) == 1
    assert (layers.start_ns >= forward.start_ns.iloc[0]).all()
    assert (layers.end_ns <= forward.end_ns.iloc[0]).all()
    assert (layers.phase == "forward").all()


def test_evaluation_belongs_to_no_step(cnn: tuple[Path, RunInfo, Done, Done]) -> None:
    trace, info, _, _ = cnn
    frame = rows(trace, info, 0)
    last = frame[(frame.kind == "phase") & (frame.name == "forward")].sort_values("start_ns")
    assert len(last) == CNN_STEPS + 1
    assert pd.isna(last.step.iloc[-1])


def test_level_comm_has_messages_and_steps_but_no_layers(tmp_path: Path) -> None:
    done = run(
        traced(tmp_path / "trace", on_ranks("ddp_cnn.py", "4"), "--level", "comm"), cwd=tmp_path
    )
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    frame = rows(tmp_path / "trace", info, 1)
    kinds = set(frame.kind)
    assert {"message", "wait", "step", "phase", "data"} <= kinds
    assert not kinds & {"layer", "gradient"}
    tensors = info.ranks[0].tensors
    sums = frame[(frame.kind == "message") & (frame.op == "all_reduce")]
    for _, buckets in sums.groupby("step"):
        assert sorted(t for ids in buckets.tensors for t in ids) == [t.id for t in tensors]


def test_accumulation_under_no_sync(tmp_path: Path) -> None:
    command = on_ranks("transformer_accumulate.py")
    plain, done = at_once(
        lambda: run(command, cwd=tmp_path),
        lambda: run(traced(tmp_path / "trace", command), cwd=tmp_path),
    )
    assert done.losses() == plain.losses()
    assert len(done.losses()) == 8
    info = read_run(tmp_path / "trace")
    frame = rows(tmp_path / "trace", info, 0)
    assert sorted(frame[frame.kind == "step"].step) == [0, 1, 2, 3]
    phases = frame[frame.kind == "phase"].groupby(["step", "name"]).size()
    for step in range(4):
        assert phases[step, "forward"] == 3
        assert phases[step, "backward"] == 3
    gradient_bytes = sum(t.bytes for t in info.ranks[0].tensors)
    sums = frame[(frame.kind == "message") & (frame.op == "all_reduce")]
    assert sums.groupby("step").bytes.sum().tolist() == [gradient_bytes] * 4
    assert sorted(t for ids in sums[sums.step == 3].tensors for t in ids) == [
        t.id for t in info.ranks[0].tensors
    ]


def test_messages_by_hand_are_counted_exactly(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", on_ranks("by_hand.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    frame = rows(tmp_path / "trace", info, 0)
    messages = frame[frame.kind == "message"].sort_values("id")
    assert (messages.status == "ok").all()
    assert messages.groupby("op").size().to_dict() == {
        "all_reduce": 3 * 4 + 3,
        "send": 3,
        "recv": 4,
        "broadcast": 1,
        "all_gather": 2,
        "reduce": 1,
        "barrier": 1,
    }
    by_tensor = messages[messages.tensors.notna()]
    assert by_tensor.groupby("step").bytes.apply(list).to_dict() == {
        step: [20 * 30 * 4, 30 * 4, 30 * 5 * 4, 5 * 4] for step in range(3)
    }
    assert [ids.tolist() for ids in by_tensor[by_tensor.step == 1].tensors] == [[0], [1], [2], [3]]
    received = messages[messages.op == "recv"]
    assert received.peer.tolist() == [1, 1, 1, 1]
    assert received.tag.tolist() == [0, 7, 0, 0]
    assert received.seq.tolist() == [0, 0, 1, 2]
    gathered = messages[messages.op == "all_gather"]
    assert gathered.bytes.tolist() == [16, 16]
    assert gathered.out_bytes.tolist() == [32, 32]
    waits = frame[frame.kind == "wait"]
    assert set(messages.id) == set(waits.parent.dropna())
    assert {g.name: g.ranks for g in info.ranks[0].groups} == {"0": (0, 1), "1": (0, 1)}


@pytest.mark.long
def test_ranks_of_spawn_are_traced(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", [sys.executable, str(JOBS / "spawned.py")]), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    assert [(r.rank, r.status) for r in info.ranks] == [(0, "complete"), (1, "complete")]
    assert (rows(tmp_path / "trace", info, 1).kind == "step").sum() == 3


def test_plain_python_with_rank_in_the_environment(tmp_path: Path) -> None:
    done = run(
        traced(tmp_path / "trace", [sys.executable, str(JOBS / "fails.py")]),
        cwd=tmp_path,
        **ONE_RANK,
    )
    assert done.status == 0, done.stderr
    assert [r.rank for r in read_run(tmp_path / "trace").ranks] == [0]


def test_a_message_can_complete_before_one_that_was_launched_earlier(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
large, small = torch.ones(20_000_000), torch.ones(2)
for _ in range(3):  # two of Gloo's threads take them up; a busy machine may run one after the other
    dist.barrier()
    first = dist.all_reduce(large, async_op=True)
    second = dist.all_reduce(small, async_op=True)
    first.wait()
    second.wait()
"""
    )
    done = run(traced(tmp_path / "trace", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    info = read_run(tmp_path / "trace")
    for rank in (0, 1):
        frame = rows(tmp_path / "trace", info, rank)
        large, small = (
            frame[(frame.op == "all_reduce") & (frame.bytes == size)].sort_values("seq")
            for size in (80_000_000, 8)
        )
        assert len(large) == len(small) == 3
        assert (large.enqueue_ns.to_numpy() < small.enqueue_ns.to_numpy()).all()
        assert (small.end_ns.to_numpy() < large.end_ns.to_numpy()).any()
