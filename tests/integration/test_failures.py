"""A job that fails: the report leads with the rank that ended first, or with what it waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import DDLTRACE, run, torchrun, traced

JOB = """
import datetime, os, sys, time
import torch, torch.distributed as dist

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


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("raises", "Rank 1 ended with exit status 1,"),
        ("is_killed", "Rank 1 was killed by SIGKILL,"),
        ("never_comes", "all_reduce number 20 of group 0 hangs: rank 0 entered it for 3.0"),
    ],
)
def test_the_report_leads_with_the_cause(tmp_path: Path, way: str, told: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    trace = tmp_path / "trace"
    done = run(traced(trace, torchrun(tmp_path / "job.py", way)), cwd=tmp_path)
    assert done.status == 1, done.stderr
    report = run([*DDLTRACE, "analyze", str(trace)], cwd=tmp_path)
    assert report.stdout.startswith(told), report.stdout[:400]
