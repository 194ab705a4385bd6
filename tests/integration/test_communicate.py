"""Every way to communicate: what the trace of a real four-rank job holds of each."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.jobs import on_ranks, run, traced
from support.traces import Recorded

import ddltrace

WORLD = 4
RANKS = range(WORLD)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    cwd = tmp_path_factory.mktemp("communicate")
    command = on_ranks("every_collective.py", ranks=WORLD)
    done = run(traced(cwd / "trace", command), cwd=cwd, timeout=240)
    assert done.status == 0, done.stderr
    assert done.stdout.count("done") == WORLD
    return Recorded(cwd / "trace")


def facts(messages: pd.DataFrame) -> list[tuple[object, ...]]:
    """Operation, bytes in, bytes out, element type, peer; None for what is null."""
    columns = messages[["op", "bytes", "out_bytes", "dtype", "peer"]].astype(object)
    return [tuple(row) for row in columns.where(columns.notna(), None).to_numpy().tolist()]


def test_nothing_failed_and_nothing_is_open(job: Recorded) -> None:
    assert job.info.notes == []
    for rank in RANKS:
        assert (job.ranks[rank].status, job.ranks[rank].errors) == ("complete", [])
        frame = job.frames[rank]
        messages = frame[frame.kind == "message"]
        assert (messages.status == "ok").all()
        assert (messages.start_ns <= messages.end_ns).all()


def test_a_collective_has_the_same_number_on_all_its_ranks(job: Recorded) -> None:
    members = {g.name: g.ranks for rank in RANKS for g in job.ranks[rank].groups}
    seen: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for rank in RANKS:
        frame = job.frames[rank]
        messages = frame[(frame.kind == "message") & ~frame.op.isin(["send", "recv"])]
        for group, seq, op in messages[["group", "seq", "op"]].itertuples(index=False):
            seen.setdefault((group, int(seq)), []).append((rank, op))
    assert len({group for group, _ in seen}) > 8
    for (group, _), sides in seen.items():
        assert tuple(rank for rank, _ in sides) == tuple(sorted(members[group]))
        assert len({op for _, op in sides}) == 1


def test_a_send_has_the_number_of_its_receive(job: Recorded) -> None:
    sides: dict[str, list[tuple[object, ...]]] = {"send": [], "recv": []}
    for rank in RANKS:
        frame = job.frames[rank]
        for op, other in (("send", (rank, None)), ("recv", (None, rank))):
            messages = frame[(frame.kind == "message") & (frame.op == op)]
            size = messages.bytes if op == "send" else messages.out_bytes
            for group, peer, tag, seq, num_bytes in zip(
                messages.group, messages.peer, messages.tag, messages.seq, size, strict=True
            ):
                ends = tuple(int(peer) if end is None else end for end in other)
                sides[op].append((group, *ends, int(tag), int(seq), int(num_bytes)))
    assert len(sides["send"]) == 3 + 4 + 4 + 3 + 2 * 2 + 2
    assert sorted(sides["send"]) == sorted(sides["recv"])


def test_plain_collectives(job: Recorded) -> None:
    assert facts(job.messages(1, "plain")) == [
        ("all_reduce", 40, 40, "float32", None),
        ("broadcast", 28, 28, "int32", 2),
        ("reduce", 48, 48, "float64", 1),
        ("all_gather", 16, 64, "float32", None),
        ("all_gather", 16, 64, "float32", None),
        ("reduce_scatter", 48, 12, "float32", None),
        ("reduce_scatter", 80, 20, "float32", None),
        ("gather", 8, 0, "float32", 3),
        ("scatter", 0, 36, "float32", 0),
        ("all_to_all", 32, 32, "float32", None),
        ("barrier", 0, 0, None, None),
        ("barrier", 0, 0, None, None),
    ]
    assert facts(job.messages(3, "plain"))[7] == ("gather", 8, 32, "float32", 3)
    assert facts(job.messages(0, "plain"))[8] == ("scatter", 144, 36, "float32", 0)


def test_asynchronous_collectives(job: Recorded) -> None:
    messages = job.messages(0, "asynchronous")
    assert facts(messages) == [
        ("all_reduce", 44, 44, "float32", None),
        ("broadcast", 48, 48, "float32", 0),
        ("all_gather", 12, 48, "float32", None),
        ("reduce_scatter", 32, 8, "float32", None),
        ("all_to_all", 16, 16, "float32", None),
        ("barrier", 0, 0, None, None),
    ]
    # All were handed over before the first was waited for.
    waits = job.section(0, "asynchronous", "wait")
    assert messages.enqueue_ns.max() <= waits.start_ns.min()
    assert sorted(waits.parent) == sorted(messages.id)


def test_waits_of_every_kind(job: Recorded) -> None:
    messages = job.messages(2, "waits")
    assert messages.bytes.tolist() == [84, 88, 92, 96, 100, 104]
    waits = job.section(2, "waits", "wait").groupby("parent").size()
    # Waited for (twice, the second time in vain), by its future, by what follows the future,
    # polled, forgotten, with others.
    counts = [int(waits.get(number, 0)) for number in messages.id]
    assert counts == [1, 1, 1, 0, 0, 1]


def test_a_wait_that_runs_out_of_time_is_no_failure(job: Recorded) -> None:
    messages = job.messages(0, "late")
    late = messages[messages.op == "all_reduce"].iloc[0]
    waits = job.section(0, "late", "wait")
    mine = waits[waits.parent == late.id]
    assert len(mine) == 2
    assert late.status == "ok"
    assert late.end_ns >= mine.end_ns.iloc[0]


def test_coalesced_collectives_are_one_message_with_all_bytes(job: Recorded) -> None:
    assert facts(job.messages(3, "coalesced")) == [
        ("all_reduce", 32, 32, "float32", None),
        ("all_reduce", 52, 52, "float32", None),
        ("all_gather", 20, 80, "float32", None),
        ("reduce_scatter", 144, 36, "float32", None),
        ("all_gather", 20, 80, "float32", None),
    ]


def test_uneven_empty_and_unusual_tensors(job: Recorded) -> None:
    for rank in RANKS:
        assert facts(job.messages(rank, "uneven")) == [
            ("all_to_all", 40, 16 * (rank + 1), "float32", None),
            ("all_gather", 0, 0, "float32", None),
            ("all_reduce", 0, 0, "float32", None),
            ("all_reduce", 24, 24, "float32", None),  # complex numbers travel as pairs
            ("all_reduce", 8, 8, "bfloat16", None),
            ("all_reduce", 5, 5, "bool", None),
            ("broadcast", 48, 48, "float32", 0),
        ]
        (sent, *others) = job.messages(rank, "uneven").split_bytes
        assert sent.tolist() == [4, 8, 12, 16]
        assert others == [None] * 6


def test_sparse_tensors_count_what_they_hold(job: Recorded) -> None:
    # Two elements: 8 bytes of index and 4 of value each; what comes out is known later.
    assert facts(job.messages(0, "sparse")) == [("all_reduce", 24, None, "float32", None)]


def test_no_grad_and_inference_mode(job: Recorded) -> None:
    assert job.messages(1, "modes").bytes.tolist() == [164, 168, 172, 176]


def test_sends_and_receives(job: Recorded) -> None:
    messages = job.messages(0, "points")
    assert facts(messages)[:4] == [
        ("send", 400, None, "float32", 1),
        ("recv", None, 400, "float32", 3),
        ("recv", None, 400, "float32", 3),
        ("send", 400, None, "float32", 1),
    ]
    anyone = messages[messages.out_bytes == 36]
    assert sorted(anyone.peer) == [1, 2, 3]


def test_collectives_of_objects_are_what_they_are_made_of(job: Recorded) -> None:
    ops = job.messages(2, "objects").op.tolist()
    assert ops[:2] == ["all_gather", "all_gather"]  # sizes, then the objects
    assert ops[2:4] == ["broadcast", "broadcast"]
    assert {"scatter", "gather"} <= set(ops)


def test_groups_have_their_members(job: Recorded) -> None:
    described = {g.description: g for g in job.ranks[0].groups}
    assert described["even"].ranks == (0, 2)
    assert described["even"].backend == "gloo"
    even = job.messages(0, "groups").query("group == @described['even'].name")
    assert even.seq[even.op != "recv"].tolist() == [0, 1, 2, 3]
    assert even.peer.dropna().tolist() == [2, 2]  # global ranks
    # Ranks 0 and 3 are not members of the group of 1 and 2.
    counts = [int((job.messages(rank, "groups").bytes == 220).sum()) for rank in RANKS]
    assert counts == [0, 1, 1, 0]


def test_device_mesh(job: Recorded) -> None:
    for rank in RANKS:
        groups = {g.name: g for g in job.ranks[rank].groups}
        messages = job.messages(rank, "mesh")
        assert messages.bytes.tolist() == [244, 248, 252]
        rows, columns, everyone = (set(groups[name].ranks) for name in messages.group)
        assert rows == {rank % 2, rank % 2 + 2}
        assert columns == {rank // 2 * 2, rank // 2 * 2 + 1}
        assert everyone == set(RANKS)
        described = [groups[name].description for name in messages.group]
        # For a dimension of all ranks, PyTorch uses the default group.
        assert described == ["mesh_rows", "mesh_columns", "default_pg, mesh_all"]


def test_functional_collectives_and_their_waits(job: Recorded) -> None:
    messages = job.messages(0, "functional")
    assert facts(messages) == [
        ("all_reduce", 284, 284, "float32", None),
        ("all_gather", 12, 48, "float32", None),
        ("reduce_scatter", 32, 8, "float32", None),
        ("all_reduce", 36, 36, "float32", None),
        ("all_to_all", 16, 16, "float32", None),
        ("broadcast", 24, 24, "float32", 2),
    ]
    waits = job.section(0, "functional", "wait")
    assert sorted(waits.parent) == sorted(messages.id)


@pytest.mark.long
def test_a_training_over_rpc_has_steps(tmp_path: Path) -> None:
    """Steps of `DistributedOptimizer` on the rank that trains; `RemoteModule` is not an error."""
    done = run(traced(tmp_path / "trace", on_ranks("rpc_training.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    job = Recorded(tmp_path / "trace")
    assert job.info.notes == []
    assert job.info.status == "complete"
    events = ddltrace.open(tmp_path / "trace").events(0).to_pandas()
    phases = events[events.kind == "phase"]
    for name in ("forward", "backward", "optimizer"):
        steps = phases[(phases.name == name) & (phases.step < 6)].step
        assert sorted(set(steps)) == [0, 1, 2, 3, 4, 5], name
    assert sorted(events[events.kind == "step"].step) == [0, 1, 2, 3, 4, 5]
    assert ddltrace.open(tmp_path / "trace").analyze().trace.steps == 6


@pytest.mark.long
def test_remote_calls_without_a_process_group(tmp_path: Path) -> None:
    done = run(traced(tmp_path / "trace", on_ranks("every_rpc.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    job = Recorded(tmp_path / "trace")
    assert job.info.notes == []
    calls = job.messages(0, "calls")
    assert set(calls.op) == set(calls.seam) == {"rpc"}
    assert set(calls.peer) == {1}
    # Synchronous, asynchronous, an operator, a script, remote and what it needs, a fetch, one
    # that fails over there, one with a callback.
    assert calls.status.tolist() == ["ok"] * 8 + ["failed", "ok"]
    assert calls.name.tolist()[2:4] == ["aten::add", "__torch__.scripted"]
    # Tensors and the pickled call around them; unknown where C++ pickles.
    assert calls.bytes.iloc[0] > 250 * 4
    assert calls.bytes.iloc[1] - calls.bytes.iloc[0] > 700 * 4
    assert calls.bytes.iloc[2:4].isna().all()
    waits = job.section(0, "calls", "wait")
    assert set(calls.id) - set(waits.parent) == {calls.id.iloc[4]}  # `remote` does not wait
    assert [(g.name, g.ranks) for g in job.ranks[1].groups] == [("rpc", (0, 1))]
