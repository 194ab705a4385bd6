"""Options and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from support import sampling

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.native import build as native_build

BROWSER = Path(__file__).parent / "browser"
UNIT = Path(__file__).parent / "unit"


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that start jobs of several processes as one group, browser tests as another.

    With the pinned versions of pytest and xdist the groups have no effect: node ids get no suffix,
    so tests of one group run on all workers. Tests therefore must not depend on running alone.
    """
    if item.path.is_relative_to(BROWSER):
        item.add_marker(pytest.mark.xdist_group("browser"))
    elif not item.path.is_relative_to(UNIT):
        item.add_marker(pytest.mark.xdist_group("jobs"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the C++ sources before the first traced job, and before workers start."""
    if not hasattr(session.config, "workerinput") and native_build.is_wanted():
        with contextlib.suppress(MissingCapabilityError):
            native_build.build()
