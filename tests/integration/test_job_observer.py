"""What is observed of a user's job: its losses, bytes and memory, and no change to the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddltrace.experiments.observation import outcomes

JOB = """
import os, socket, sys
from pathlib import Path
import torch
import torch.distributed as dist
from ddltrace.tracer.capture.session import start_session
from ddltrace.tracer.config import CaptureConfig
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
start_session(CaptureConfig(directory=Path(os.environ["TRACE"])))
from ddltrace.experiments.observation.job_observer import install_if_asked
install_if_asked()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
for step in range(6):
    for part in (1.0, 3.0):
        loss = model(torch.full((1, 1), step * part)).sum()
        (scaler.scale(loss) if step >= 4 else loss).backward()
    client.sendall(b"x" * 1000)
    peer.recv(1000, socket.MSG_WAITALL)
    optimizer.step()
    other.step()
print("done")
"""


def observe(tmp_path: Path, **environment: str) -> Path:
    outcome_file = tmp_path / "run.outcome.json"
    asked = outcomes.environment(outcome_file, warmup=2, steps=5)
    done = subprocess.run(
        [sys.executable, "-c", JOB],
        env={
            "RANK": "3",
            "PATH": "",
            "OMP_NUM_THREADS": "1",
            "TRACE": str(tmp_path.with_suffix(".trace")),
            **asked,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    return outcome_file


def test_losses_bytes_and_memory_of_a_rank(tmp_path: Path) -> None:
    outcome_file = observe(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path == outcomes.part_path(outcome_file, 3)
    value = json.loads(path.read_text())
    # The mean of two backward passes a step, also where a scaler multiplied them.
    assert value["losses"] == [0, 2, 4, 6, 8, 10]
    assert value["peak_memory"] > 50e6
    if sys.platform.startswith("linux"):
        assert value["wire_bytes"] == 1000
    outcome = outcomes.read(outcome_file)
    assert outcome is not None
    assert outcome["losses"] == value["losses"]
    assert outcome["peak_memory_bytes"] == [value["peak_memory"]]


def test_a_failure_is_kept_from_the_job(tmp_path: Path) -> None:
    observe(tmp_path, RANK="no number")
    assert not list(tmp_path.iterdir())


def test_ranks_are_put_together(tmp_path: Path) -> None:
    outcome_file = tmp_path / "run.outcome.json"
    for rank, losses in enumerate([[1.0, 2.0, 3.0], [3.0, 4.0]]):
        part = {
            "losses": losses,
            "wire_bytes": rank,
            "digest": None,
            "peak_memory": None,
            "notes": ["both", f"rank {rank}"],
        }
        outcomes.part_path(outcome_file, rank).write_text(json.dumps(part))
    assert outcomes.read(outcome_file) == {
        "losses": pytest.approx([2.0, 3.0, 3.0]),
        "wire_bytes_per_step": [0, 1],
        "notes": ["both", "rank 0", "rank 1"],
        "replicas_identical": None,
    }
    outcomes.part_path(outcome_file, 1).write_text(json.dumps({**part, "losses": []}))
    assert (outcomes.read(outcome_file) or {})["losses"] == []
    outcomes.remove(outcome_file)
    assert outcomes.read(outcome_file) is None
