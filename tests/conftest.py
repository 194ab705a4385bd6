"""Options and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from support import sampling

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.native import build as native_build

UNIT = Path(__file__).parent / "unit"
LONGEST = ("test_harm.py", "test_experiments_command.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run every case of the matrices that are sampled otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    # In the environment: test modules read both while they are collected, on every worker.
    if config.getoption("--all-cases"):
        os.environ[sampling.ALL_VARIABLE] = "1"
    sampling.choose_seed()


def pytest_report_header() -> str:
    if sampling.all_cases():
        return "long matrices: every case"
    seed = sampling.choose_seed()
    return f"long matrices: sampled with seed {seed} ({sampling.SEED_VARIABLE}={seed} repeats it)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slow files first: a run on several workers then ends with short ones on each.

    `dev.py test` sends a file as a whole to one worker (`--dist loadfile`): its tests share jobs.
    """
    items.sort(key=_order_of_file)


def _order_of_file(item: pytest.Item) -> int:
    """The longest file, then those that start jobs or a browser, then the unit tests."""
    if item.path.name in LONGEST:
        return LONGEST.index(item.path.name) - len(LONGEST)
    return int(item.path.is_relative_to(UNIT))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the C++ sources before the first traced job, and before workers start."""
    if not hasattr(session.config, "workerinput") and native_build.is_wanted():
        with contextlib.suppress(MissingCapabilityError):
            native_build.build()
