"""What process groups written in Python send is recorded as what those of PyTorch send."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from support.jobs import Done, on_ranks, run, traced
from support.sampling import sampled
from support.traces import SAME_OF_MESSAGES, last_of_messages, read_last_rows

from ddltrace.tracer.trace.run_info import GroupInfo
from ddltrace.tracer.trace.run_reader import read_run

SAME = [column for column in SAME_OF_MESSAGES if column not in ("group", "lane")]


def traced_with(directory: Path, how: str) -> Done:
    command = on_ranks("python_groups.py", how)
    done = run(traced(directory / how, command), cwd=directory)
    assert done.status == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    directory = tmp_path_factory.mktemp("gloo")
    return directory / "gloo", traced_with(directory, "gloo").losses()


def messages(trace: Path, rank: int) -> tuple[pd.DataFrame, dict[str, GroupInfo]]:
    """The messages of a rank in the order of their launch, and its groups by name."""
    info = next(info for info in read_run(trace).ranks if info.rank == rank)
    assert info.errors == []
    events = read_last_rows(trace, info.segment)[0].to_pandas()
    frame = last_of_messages(events).sort_values("enqueue_ns").reset_index(drop=True)
    return frame, {group.name: group for group in info.groups}


@pytest.mark.parametrize("how", sampled(["backend", "handles", "blocking", "inner"], 2))
@pytest.mark.long
def test_the_same_is_recorded_as_by_a_group_of_pytorch(
    tmp_path: Path, by_gloo: tuple[Path, list[str]], how: str
) -> None:
    reference, values = by_gloo
    assert traced_with(tmp_path, how).losses() == values
    for rank in (0, 1):
        found, groups = messages(tmp_path / how, rank)
        expected, _ = messages(reference, rank)
        assert len(expected) == 29
        assert_frame_equal(found[SAME], expected[SAME])
        assert (found.start_ns >= found.enqueue_ns).all()
        assert (found.end_ns >= found.start_ns).all()
        # What a group only passes on to one of PyTorch's is that one's, and recorded once.
        (name,) = set(found.group)
        assert name == ("inner" if how == "inner" else "0")
        assert groups[name].ranks == (0, 1)
        assert how == "inner" or groups[name].backend == "mine"


def test_one_that_hangs_in_its_own_code_is_seen(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(HANGS)
    done = run(traced(tmp_path / "trace", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status != 0
    found, _ = messages(tmp_path / "trace", 0)
    assert list(found.status) == ["ok", "ok", "open"]
    assert list(found.op) == ["all_reduce"] * 3
    assert set(found.seam) == {"python group"}
    found, _ = messages(tmp_path / "trace", 1)
    assert list(found.status) == ["ok", "ok"]


@pytest.mark.long
def test_torchcomms_where_pytorch_lacks_it_changes_nothing(tmp_path: Path) -> None:
    """PyTorch splits the groups of a mesh in another way then."""
    command = on_ranks("switched.py", "fsdp")
    asked = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    untraced = run(command, cwd=tmp_path, **asked)
    assert untraced.status == 0, untraced.stderr
    losses = [line for line in untraced.stdout.splitlines() if line.startswith("losses")]
    assert losses
    for name, variables in (("asked", asked), ("plain", {})):
        done = run(traced(tmp_path / name, command), cwd=tmp_path, **variables)
        assert done.status == 0, done.stderr
        assert losses[0] in done.stdout
    for rank in (0, 1):
        (found, _), (expected, _) = (messages(tmp_path / name, rank) for name in ("asked", "plain"))
        assert_frame_equal(found[[*SAME, "seam"]], expected[[*SAME, "seam"]])


# Rank 1 ends while rank 0 waits in a method that blocks.
HANGS = """
import json, os, threading, time
import torch, torch.distributed as dist

class Blocking(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.own, self.members, self.calls = store, rank, size, 0
    def allreduce(self, tensors, opts=None):
        self.calls += 1
        key = f"call{self.calls}"
        self.store.set(f"{key}/{self.own}", str(tensors[0].tolist()))
        parts = [self.store.get(f"{key}/{rank}") for rank in range(self.members)]
        tensors[0].copy_(sum(torch.tensor(json.loads(part)) for part in parts))
    def getBackendName(self):
        return "blocking"

dist.Backend.register_backend("blocking", Blocking, devices=["cpu"])
dist.init_process_group("blocking")
tensor = torch.full((4,), dist.get_rank() + 1.0)
for number in range(3):
    if number == 2 and dist.get_rank() == 1:
        time.sleep(8)
        os._exit(3)
    if dist.get_rank() == 0 and number == 2:
        threading.Timer(3, os._exit, (4,)).start()
    dist.all_reduce(tensor)
    assert tensor.sum() == (12, 24)[number]
"""


@pytest.mark.long
def test_messages_of_a_device_that_pytorch_does_not_know(tmp_path: Path) -> None:
    """A device of `PrivateUse1` with a backend of its own."""
    done = run(traced(tmp_path / "trace", on_ranks("private_device.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert done.losses() == [f"rank {rank} loss 3000.0 on mydevice:0" for rank in (0, 1)]
    for rank in (0, 1):
        found, groups = messages(tmp_path / "trace", rank)
        assert list(found.op) == ["all_reduce", "broadcast"]
        assert list(found.bytes) == [4000, 4000]
        assert list(found.dtype) == ["float32", "float32"]
        assert (found.end_ns >= found.start_ns).all()
        assert [group.backend for group in groups.values()] == ["mybackend"]
