"""Options and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support import sampling
from support.slim_environment import project

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.extensions import GROUP
from ddltrace.tracer.native import build as native_build

UNIT = Path(__file__).parent / "unit"
LONGEST = ("test_harm.py", "test_experiments_command.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run every case of the matrices that are sampled otherwise",
    )
    parser.addoption(
        "--some-long",
        action="store_true",
        help="of the tests marked as long, run a random part: one of twelve",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    registered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if registered != project()["entry-points"][GROUP]:
        raise pytest.UsageError(
            "ddltrace is installed with other entry points than pyproject.toml has; "
            "run: python3 dev.py setup"
        )
    # In the environment: test modules read both while they are collected, on every worker.
    if config.getoption("--all-cases"):
        os.environ[sampling.ALL_VARIABLE] = "1"
    seed = sampling.choose_seed()
    # On a busy machine an example may take as long as it will.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")
    if config.option.hypothesis_seed is None:  # read by Hypothesis's plugin
        config.option.hypothesis_seed = str(seed)


def pytest_report_header() -> str:
    cases = "every case" if sampling.all_cases() else "a sample"
    seed = sampling.choose_seed()
    return f"long matrices: {cases}, seed {seed} ({sampling.SEED_VARIABLE}={seed} repeats it)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the slow files first: a run on several workers then ends with short ones on each.

    `dev.py test` sends a file as a whole to one worker (`--dist loadfile`): its tests share jobs.
    """
    items.sort(key=_order_of_file)
    if config.getoption("--some-long"):
        of_long = sorted(item.nodeid for item in items if item.get_closest_marker("long"))
        left_out = set(of_long) - set(sampling.sampled(of_long, -(-len(of_long) // 12)))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


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
