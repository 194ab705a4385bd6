"""What a job reads of parameters that it has kept is the same under a strategy."""

from __future__ import annotations

import ast
import json
import signal
from pathlib import Path

import pytest
from support.jobs import JOBS, on_ranks, run, traced
from support.sampling import sampled

DEFERRING = ["p3:slice=4", "wfbp:wait=layer", "bytescheduler", "tictac"]


def paths() -> list[str]:
    """The names in the job's table, without importing it."""
    for node in ast.parse((JOBS / "kept_parameters.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATHS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("no PATHS")


def train(directory: Path, spec: str | None, *names: str) -> tuple[list[object], str]:
    """What both ranks have read in each path, their final weights, and what was printed."""
    output = directory / "found"
    command = on_ranks("kept_parameters.py", str(output), *names)
    if spec is not None:
        command = traced(directory / f"trace of {names[:1]}", command, "--strategy", spec)
    done = run(command, cwd=directory)
    if spec is None and done.status == signal.SIGABRT:
        # PyTorch alone ends so once in some hundred runs: "terminate called without an exception".
        done = run(command, cwd=directory)
    assert done.status == 0, done.stderr[-3000:]
    lines = [Path(f"{output}.{rank}").read_text().splitlines() for rank in (0, 1)]
    return [json.loads(line) for rank in lines for line in rank], done.stderr


@pytest.mark.parametrize("spec", sampled(DEFERRING, 1))
@pytest.mark.long
def test_every_use_of_a_parameter_sees_its_update(spec: str, tmp_path: Path) -> None:
    expected, _ = train(tmp_path, None)
    found, said = train(tmp_path, spec)
    assert len(found) == 2 * len(paths())
    assert found == expected
    assert said.count("share memory with other tensors") == 1
    _, said = train(tmp_path, spec, "one of them", "moving average")
    assert "share memory" not in said


@pytest.mark.long
def test_delayed_updates_are_not_delayed_where_views_would_show_the_local_copy(
    tmp_path: Path,
) -> None:
    (first, second), said = train(tmp_path, "odsgd:warmup=1", "views")
    assert first == second
    assert "updates are not delayed" in said
    reading = [path for path in paths() if path in ("moving average", "norms", "evaluation")]
    found, said = train(tmp_path, "odsgd:warmup=1", *reading)
    assert found[: len(reading)] == found[len(reading) :]  # both ranks have read the global weights
    assert "updates are not delayed" not in said
