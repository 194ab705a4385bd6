"""What Python launches past Python's kernels is recorded as those would have recorded it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from support.jobs import on_ranks, run, traced
from support.traces import SAME_OF_MESSAGES, last_of_messages, read_last_rows

from ddltrace.tracer.native import build as native_build
from ddltrace.tracer.trace.run_reader import read_run

pytestmark = pytest.mark.skipif(
    native_build.compiler() is None, reason="no C++ compiler on this machine"
)


def messages(trace: Path, rank: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The messages of a rank in the order of their launch, and its waits."""
    info = next(info for info in read_run(trace).ranks if info.rank == rank)
    assert info.errors == []
    events = read_last_rows(trace, info.segment)[0].to_pandas()
    frame = last_of_messages(events).sort_values("enqueue_ns").reset_index(drop=True)
    return frame, events[events.kind == "wait"]


@pytest.mark.long
def test_the_same_is_recorded_as_by_the_kernels(tmp_path: Path) -> None:
    command = on_ranks("launches.py")
    untraced = run(command, cwd=tmp_path)
    assert untraced.status == 0, untraced.stderr
    for native in "10":
        traced_job = traced(tmp_path / native, command)
        done = run(traced_job, cwd=tmp_path, DDLTRACE_NATIVE=native)
        assert done.status == 0, done.stderr
        assert done.losses() == untraced.losses()
        counts = [int(x.split()[-1]) for x in done.stdout.splitlines() if "passed by" in x]
        if native == "1":
            assert min(counts) >= 80
        else:
            assert counts == [0, 0]
    for rank in (0, 1):
        found, waits = messages(tmp_path / "1", rank)
        expected, expected_waits = messages(tmp_path / "0", rank)
        assert_frame_equal(found[SAME_OF_MESSAGES], expected[SAME_OF_MESSAGES])
        assert len(waits) == len(expected_waits)
        # One in three is divided evenly, one is a functional collective; the rest runs twice.
        exchanged = found.split_bytes[found.op == "all_to_all"].tolist()
        uneven = [12, 20] if rank == 0 else [20, 12]
        assert [None if each is None else each.tolist() for each in exchanged] == [
            *(None, uneven, [16, 16], [4, 4]),
            *(None, uneven, [16, 16]),
        ]
        assert (found.start_ns >= found.enqueue_ns).all()
        assert (found.end_ns.dropna() >= found.start_ns[found.end_ns.notna()]).all()
        unwaited = (found.op == "send") & (found.tag == 3)
        assert unwaited.sum() == 2
        assert set(found[~unwaited].status) == {"ok"}
        assert set(found[unwaited].status) == {"open"}
        assert set(expected.seam) == {"dispatcher"}
        assert set(found.seam) == {"dispatcher", "method"}
        assert "float16" not in set(found.dtype)  # tensors that only had a shape
        # What the job's hook sends is its parameter's, though a bucket has the same memory.
        reduced = found[found.op == "all_reduce"]
        assert set(reduced.name) > {"1.weight", "bucket 0"}
        counts = reduced.name.value_counts()
        of_hooks = ["0.weight#2", "0.bias", "1.weight#2", "1.bias"]
        assert [counts[name] for name in of_hooks] == [6] * 4


def test_a_pause_is_passed_by_and_counted(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PAUSES)
    done = run(traced(tmp_path / "trace", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    for rank in (0, 1):
        found, _ = messages(tmp_path / "trace", rank)
        assert list(found[found.op == "all_reduce"].seq) == [1, 2, 8, 9]


@pytest.mark.long
def test_a_message_that_nobody_waits_for_holds_no_others_up(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(UNWAITED)
    done = run(traced(tmp_path / "trace", on_ranks(tmp_path / "job.py")), cwd=tmp_path)
    assert done.status == 0, done.stderr
    counts = [int(line.split()[-1]) for line in done.stdout.splitlines() if "in the ring" in line]
    assert counts == [NUM_REDUCED + 2] * 2
    for rank in (0, 1):
        found, _ = messages(tmp_path / "trace", rank)
        reduced = found[found.op == "all_reduce"]
        assert list(reduced.seq) == list(range(1, NUM_REDUCED + 1))
        assert set(reduced.status) == {"ok"}
        assert list(found[found.op == "send"].status) == ["open"]


def test_a_signal_handler_may_launch_in_the_middle_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SIGNALS)
    job = traced(tmp_path / "trace", on_ranks(tmp_path / "job.py", ranks=1))
    done = run(job, cwd=tmp_path)
    assert done.status == 0, done.stderr
    found, _ = messages(tmp_path / "trace", 0)
    handled = int(done.stdout.split()[-1])
    assert handled > 100
    assert (found.dtype == "float64").sum() == handled
    assert (found.dtype == "float32").sum() == 4000
    assert sorted(found.seq) == list(range(len(found)))
    assert set(found.status) == {"ok"}


# The handler runs wherever the interpreter stops: before, in and after our own code.
SIGNALS = """
import signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor, other, handled, busy = torch.ones(3), torch.ones(2, dtype=torch.float64), 0, False
def handler(*_):
    global handled, busy
    if not busy:
        busy = True
        dist.all_reduce(other)
        handled += 1
        busy = False
dist.barrier()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for _ in range(4000):
    dist.all_reduce(tensor, async_op=True).wait()
signal.setitimer(signal.ITIMER_REAL, 0)
print("handled", handled)
"""

NUM_REDUCED = 4200  # more than the ring has places

UNWAITED = f"""
import sys, torch, torch.distributed as dist
from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
from ddltrace.tracer.capture.session import current_session
in_ring, original = [], KnownMessages.launched
def launched(*args, **kwargs):
    in_ring.append(original(*args, **kwargs))
    return in_ring[-1]
KnownMessages.launched = launched
dist.init_process_group("gloo")
dist.barrier()
sent, received, tensor = torch.ones(6), torch.empty(6), torch.ones(3)
kept = dist.isend(sent, 1 - dist.get_rank())
dist.recv(received, 1 - dist.get_rank())
for number in range({NUM_REDUCED}):
    dist.all_reduce(tensor)
    if number % 500 == 0:  # the writer may be late
        current_session().known.collect()
assert None not in in_ring
sys.stdout.write(f"in the ring {{len(in_ring)}}\\n")  # in one piece
dist.barrier()
"""

PAUSES = """
import torch, torch.distributed as dist
from ddltrace.tracer.capture.session import current_session
dist.init_process_group("gloo")
recorder, tensor = current_session().recorder, torch.ones(3)
dist.barrier()
for number in range(9):
    recorder.paused = 2 <= number < 7
    dist.all_reduce(tensor)
"""
