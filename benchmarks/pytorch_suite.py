#!/usr/bin/env python3
"""Runs PyTorch's own distributed tests traced and untraced, and compares their outcomes.

The tests ship inside the torch wheel (`torch.testing._internal.distributed.distributed_test`);
they need the small package `expecttest`. Each test starts its ranks as processes on the Gloo
backend. The suite runs twice, in the same order: as it is, and below `ddltrace run`. A test
whose outcomes differ is run some more times both ways, so that a test that is unsteady by
itself is distinguished from one that the tracer changes.

Examples:
  python benchmarks/pytorch_suite.py                       all of them: about half an hour
  python benchmarks/pytorch_suite.py --limit 20 --seed 1   a sample
  python benchmarks/pytorch_suite.py -k broadcast -k DistributedDataParallel
  python benchmarks/pytorch_suite.py --world-size 4 test_send_recv test_send_recv_with_tag
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

EXCEPTIONS: Final[dict[str, str]] = {}
"""Tests whose outcome may differ when traced, each with the reason."""

RETRIES: Final = 3
_MODULE: Final = "torch.testing._internal.distributed.distributed_test"


def main() -> int:
    """Compares both runs and returns 1 if the tracer changed an outcome."""
    arguments = parser().parse_args()
    if arguments.outcomes is not None:
        run_tests(arguments.tests, arguments.outcomes)
        return 0
    names = chosen_tests(arguments)
    if not names:
        print("no test has such a name", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        compare = Comparison(Path(scratch), arguments)
        changed = compare.run(names)
    return 1 if changed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("-k", dest="patterns", action="append", default=[], help="part of a name")
    top.add_argument("--limit", type=int, help="run a random sample of this size")
    top.add_argument("--seed", type=int, default=0, help="seed of the sample")
    top.add_argument("--world-size", type=int, default=3, help="ranks of each test")
    top.add_argument("--timeout", type=int, default=60, help="seconds for one test")
    top.add_argument(
        "--start-method",
        choices=("fork", "spawn"),
        default="fork",
        help="how ranks start; fork is ten times as fast, spawn is what PyTorch's CI does",
    )
    top.add_argument("--json", type=Path, help="write all outcomes to this file")
    top.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)
    top.add_argument("tests", nargs="*", help="whole names of tests; without any, all")
    return top


# --- one run of the suite, in a process of its own --------------------------------------------


def test_case() -> Any:
    """PyTorch's tests as a class that starts its ranks the way the environment says."""
    import importlib

    module: Any = importlib.import_module(_MODULE)
    context = __import__("torch").multiprocessing.get_context(os.environ["SUITE_START_METHOD"])

    class TestDistBackend(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """All tests of the module."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(context.Process)

    # A spawned rank finds the class by its name.
    TestDistBackend.__qualname__ = "TestDistBackend"
    globals()["TestDistBackend"] = TestDistBackend
    return TestDistBackend


def run_tests(names: Sequence[str], outcomes: Path) -> None:
    """Runs tests one after the other and appends a JSON line for each."""
    case = test_case()
    with outcomes.open("a", encoding="utf-8") as file:
        for name in names:
            result = unittest.TestResult()
            unittest.TestSuite([case(name)]).run(result)
            outcome, detail = "passed", ""
            if result.skipped:
                outcome, detail = "skipped", result.skipped[0][1]
            for kind, found in (("failed", result.failures), ("error", result.errors)):
                if found:
                    outcome, detail = kind, found[0][1][-4000:]
            file.write(json.dumps([name, outcome, detail]) + "\n")
            file.flush()


# --- the comparison -------------------------------------------------------------------------


def suite_environment(arguments: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """What the tests expect to find in their environment."""
    return {
        **os.environ,
        "BACKEND": "gloo",
        "WORLD_SIZE": str(arguments.world_size),
        "TEMP_DIR": str(scratch),
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.timeout),
        "SUITE_START_METHOD": arguments.start_method,
    }


def chosen_tests(arguments: argparse.Namespace) -> list[str]:
    """The names that the command line asks for, in the order in which they stand."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(suite_environment(arguments, Path(scratch)))
        names: list[str] = list(unittest.TestLoader().getTestCaseNames(test_case()))
    if arguments.tests:
        names = [n for n in names if n in arguments.tests]
    if arguments.patterns:
        names = [n for n in names if any(pattern in n for pattern in arguments.patterns)]
    if arguments.limit is not None and arguments.limit < len(names):
        chosen = set(random.Random(arguments.seed).sample(names, arguments.limit))
        names = [n for n in names if n in chosen]
    return names


class Comparison:
    """Runs tests both ways and says what differs.

    Args:
        scratch: A folder for traces and for what the tests write.
        arguments: The command line.
    """

    def __init__(self, scratch: Path, arguments: argparse.Namespace) -> None:
        self._scratch = scratch
        self._arguments = arguments
        self._runs = 0

    def run(self, names: Sequence[str]) -> list[str]:
        """Compares the outcomes of tests.

        Returns:
            The tests that the tracer changed and that are not listed exceptions.
        """
        plain = self._outcomes(names, traced=False)
        traced = self._outcomes(names, traced=True)
        if self._arguments.json is not None:
            both = {n: [plain.get(n), traced.get(n)] for n in names}
            self._arguments.json.write_text(json.dumps(both, indent=1), encoding="utf-8")
        for label, outcomes in (("untraced", plain), ("traced", traced)):
            counts = Counter(outcomes[n][0] for n in names)
            print(f"{label:8}", ", ".join(f"{c} {o}" for o, c in sorted(counts.items())))
        changed = []
        for name in names:
            if plain[name][0] == traced[name][0]:
                continue
            reason = EXCEPTIONS.get(name) or self._unsteady(name, plain[name], traced[name])
            print(f"{name}: {plain[name][0]} untraced, {traced[name][0]} traced: ", end="")
            print(reason or f"CHANGED BY THE TRACER\n{traced[name][1]}")
            if reason is None:
                changed.append(name)
        print(f"{len(changed)} of {len(names)} outcomes changed by the tracer")
        return changed

    def _unsteady(self, name: str, plain: Sequence[str], traced: Sequence[str]) -> str | None:
        """Why a difference is none of the tracer's, if more runs show the same spread."""
        seen = [{plain[0]}, {traced[0]}]
        for _ in range(RETRIES):
            seen[0].add(self._outcomes([name], traced=False)[name][0])
            seen[1].add(self._outcomes([name], traced=True)[name][0])
            if seen[0] & seen[1]:
                return f"unsteady: untraced {sorted(seen[0])}, traced {sorted(seen[1])}"
        return None

    def _outcomes(self, names: Sequence[str], *, traced: bool) -> Mapping[str, Sequence[str]]:
        """Outcome and detail of each test; one that ended the whole run counts as a crash."""
        outcomes: dict[str, Sequence[str]] = {}
        left = list(names)
        while left:
            self._runs += 1
            file = self._scratch / f"outcomes-{self._runs}.jsonl"
            temp = self._scratch / f"temp-{self._runs}"
            temp.mkdir()
            command = [sys.executable, __file__, "--outcomes", str(file), *left]
            if traced:
                trace = self._scratch / f"trace-{self._runs}"
                command = [*(sys.executable, "-m", "ddltrace", "run", "-o", str(trace)), *command]
            with (self._scratch / f"output-{self._runs}.txt").open("wb") as output:
                subprocess.run(
                    command,
                    env=suite_environment(self._arguments, temp),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if file.exists():
                for line in file.read_text(encoding="utf-8").splitlines():
                    name, *outcome = json.loads(line)
                    outcomes[name] = outcome
            before, left = left, [n for n in left if n not in outcomes]
            if left and left[0] == next(n for n in before if n in left):
                outcomes[left.pop(0)] = ("crash", "the whole run ended in this test")
        return outcomes


# Ranks that were spawned import this file to find the class of their tests.
if __name__ == "__mp_main__" and "SUITE_START_METHOD" in os.environ:
    test_case()

if __name__ == "__main__":
    sys.exit(main())
