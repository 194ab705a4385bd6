"""A job that fails: the report leads with the rank that ended first, or with what it waited for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, STATUS_REMAINS, free_port, run, torchrun, traced
from support.sampling import sampled

# How a rank ended that was killed: where the kernel forgets it, its launcher may be the faster.
KILLED = [
    "was killed by SIGKILL",
    *(() if STATUS_REMAINS else ("ended without closing its trace",)),
]
JOB = """
import datetime, os, sys, time
import torch, torch.distributed as dist

# A busy machine may start one far later than the other, and the time-out is short.
open(f"came{os.environ['RANK']}", "w").close()
while not (os.path.exists("came0") and os.path.exists("came1")):
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
for _ in range(20):
    dist.all_reduce(torch.ones(4))
time.sleep(2)  # the launcher comes to see it
if dist.get_rank() == 1:
    if sys.argv[1] == "raises":
        raise RuntimeError("on purpose")
    if sys.argv[1] == "is_killed":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "never_comes":
        time.sleep(600)
dist.all_reduce(torch.ones(4))
time.sleep(600)
"""


WAYS = [
    ("raises", ["Rank 1 ended with exit status 1,"]),
    ("is_killed", [f"Rank 1 {how}," for how in KILLED]),
    ("never_comes", ["all_reduce number 20 of group 0 hangs: rank 0 entered it for "]),
]


@pytest.mark.parametrize(("way", "reported"), sampled(WAYS, 1))
def test_the_report_leads_with_the_cause(tmp_path: Path, way: str, reported: list[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    trace = tmp_path / "trace"
    done = run(traced(trace, torchrun(tmp_path / "job.py", way)), cwd=tmp_path)
    assert done.status == 1, done.stderr
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.stdout.startswith(tuple(reported)), report.stdout[:400]


UNSEEN = """
import os, signal, subprocess, sys, time

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel keeps no status of children
common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "WORLD_SIZE": "2"}
ranks = [
    subprocess.Popen([sys.executable, "job.py"], env={**common, "RANK": str(rank)})
    for rank in range(2)
]
for rank in ranks:
    rank.wait()
sys.exit(int(sys.argv[1]))
"""
ENDS = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
time.sleep(2)  # the launcher comes to see it
while dist.get_rank() == 1 and os.path.exists(f"/proc/{pids[0]}"):
    time.sleep(0.1)
time.sleep(1.5 * dist.get_rank())
os.kill(os.getpid(), 9)
"""


@pytest.mark.long
@pytest.mark.parametrize(("status", "fails"), [("0", False), ("3", True)])
def test_ranks_that_are_ended_after_their_work_have_not_failed(
    tmp_path: Path, status: str, fails: bool
) -> None:
    (tmp_path / "job.py").write_text(ENDS)
    (tmp_path / "starts.py").write_text(UNSEEN)
    trace = tmp_path / "trace"
    command = [sys.executable, "starts.py", status, str(free_port())]
    assert run(traced(trace, command), cwd=tmp_path).status == int(status)
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.stdout.startswith(tuple(f"Rank 0 {how}," for how in KILLED)) is fails, (
        report.stdout[:400]
    )
