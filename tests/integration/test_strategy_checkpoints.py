"""Checkpoints under strategies that keep state between steps, and sparse gradients."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import LAUNCH_RANKS, Done, run

JOB = Path(__file__).parent / "jobs" / "checkpoint_job.py"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Done]:
    folder = tmp_path_factory.mktemp("checkpoints")
    done = run([sys.executable, str(LAUNCH_RANKS), "2", str(JOB), "report"], cwd=folder)
    assert done.status == 0, done.stderr[-4000:]
    return json.loads((folder / "report").read_text()), done


def test_a_run_from_a_checkpoint_ends_as_the_run_that_went_on(
    ran: tuple[list[dict[str, Any]], Done],
) -> None:
    for rank in ran[0]:
        assert len(rank["resumed"]) == 11
        for spec, found in rank["resumed"].items():
            assert found["equal"], spec
            assert found["keys_of_plain_model"], spec


def test_sparse_gradients_travel_as_such_and_that_is_said_once(
    ran: tuple[list[dict[str, Any]], Done],
) -> None:
    for rank in ran[0]:
        assert rank["sparse"]["equal_to_ddp"]
        assert rank["sparse"]["gated"]
        assert rank["sparse"]["said_before"] == []
        [said] = rank["sparse"]["said"]
        assert "'0.weight' are sparse" in said
    reported = [line for line in ran[1].stderr.splitlines() if "'0.weight' are sparse" in line]
    assert len(reported) == 1
    assert reported[0].startswith(
        "ddltrace: strategy topk:density=0.1: the gradients of '0.weight'"
    )


@pytest.mark.long
def test_a_checkpoint_contains_the_servers_optimizer_state(tmp_path: Path) -> None:
    # The servers of "ps:servers=1" only sum: there, the job's own optimizer has the state.
    specs = ["ps:servers=2+asp@adamw", "ps:servers=1@momentum"]
    done = run([sys.executable, str(LAUNCH_RANKS), "1", str(JOB), "report", *specs], cwd=tmp_path)
    assert done.status == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "report").read_text())
    expected = {"equal": True, "keys_of_plain_model": True, "optimizer_state": True}
    assert found == dict.fromkeys(specs, expected)
