"""Every way to make gradients, under strategies: as under plain DDP, or one line and status 1."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support.jobs import JOBS, on_ranks, run, traced
from support.sampling import choose_seed, sampled

# How far weights may be from those of plain DDP: None where a strategy trains in another way.
STRATEGIES = {
    "wfbp": 0.0,
    "ring": 0.0,
    "p3:slice=4": 0.0,
    "ps": 1e-5,
    "fp16": 1e-2,
    "localsgd:period=1": 1e-5,
    "diloco:period=2": None,
    "accumulate:steps=2": None,
    "lars": None,
    "asp": None,
}


def _paths() -> list[str]:
    """The names in the job's table, without importing it."""
    for node in ast.parse((JOBS / "backward_paths.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATHS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("no PATHS")


def outcomes(
    directory: Path, seed: int, paths: list[str], spec: str | None
) -> dict[str, list[object] | str]:
    """The weights of both ranks after each path, or the line with which the job has ended in it."""
    found: dict[str, list[object] | str] = {}
    while len(found) < len(paths):
        left = [path for path in paths if path not in found]
        output = directory / "found"
        command = on_ranks("backward_paths.py", str(seed), str(output), *left)
        if spec is not None:
            command = traced(directory / f"trace{len(found)}", command, "--strategy", spec)
        done = run(command, cwd=directory, timeout=150)
        ranks = [
            [json.loads(line) for line in Path(f"{output}.{rank}").read_text().splitlines()]
            for rank in (0, 1)
        ]
        for (path, first), (_, second) in zip(*ranks, strict=False):
            found[path] = [first, second]
        if done.status:
            lines = [line for line in done.stderr.splitlines() if "cannot be applied" in line]
            told = (done.status, len(lines), "Traceback" in done.stderr)
            path = next(path for path in paths if path not in found)
            assert told == (1, 1, False), (spec, path, told, done.stderr[-3000:])
            found[path] = lines[0]
    return found


def distance(one: object, other: object) -> float:
    if isinstance(one, list) and isinstance(other, list):
        return max(distance(a, b) for a, b in zip(one, other, strict=True))
    assert isinstance(one, float)
    assert isinstance(other, float)
    return abs(one - other)


@pytest.mark.long
@pytest.mark.parametrize("spec", sampled(list(STRATEGIES), 1))
def test_a_strategy_trains_as_plain_ddp_or_ends_the_job(spec: str, tmp_path: Path) -> None:
    seed = choose_seed()
    always = ["plain", "dist autograd", "by hand"]
    paths = always + [path for path in sampled(_paths(), 8) if path not in always]
    plain = outcomes(tmp_path, seed, paths, None)
    for path, found in outcomes(tmp_path, seed, paths, spec).items():
        expected = plain[path]
        if isinstance(found, str):
            assert path != "plain", found
            continue
        assert path != "dist autograd", spec
        allowed = STRATEGIES[spec]
        if allowed is None or (spec.startswith("localsgd") and expected[0] != expected[1]):
            # By its own plan. What plain DDP never exchanges, such as a second backward pass
            # through the same graph, strategies that keep its exchanges do not exchange either.
            keeps = spec == "lars" or spec.startswith("accumulate")
            if spec != "asp" and not (keeps and expected[0] != expected[1]):
                assert distance(found[0], found[1]) == 0 or found == expected, (spec, path)
        else:
            assert distance(found, expected) <= allowed, (spec, path, found, expected)


@pytest.mark.long
@pytest.mark.parametrize("spec", sampled(list(STRATEGIES), 1))
def test_a_strategy_ends_a_job_of_remote_calls_that_train(spec: str, tmp_path: Path) -> None:
    command = on_ranks("ddp_in_rpc.py", str(tmp_path / "found"), ranks=4)
    done = run(traced(tmp_path / "trace", command, "--strategy", spec), cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if "cannot be applied" in line]
    assert (done.status, len(told)) == (1, 1), done.stderr[-3000:]
    assert "torch.distributed.autograd keeps gradients apart" in told[0]
    # The process ends with the line, not the remote call with an exception of the engine.
    assert "StrategyRefusedError" not in done.stderr
    assert not (tmp_path / "found.0").exists()
