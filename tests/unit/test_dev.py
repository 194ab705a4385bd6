"""The set-up script: what it passes on, when it sets up anew, how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev() -> Any:
    return scripts.load(ROOT / "dev.py")


@pytest.mark.parametrize(
    ("line", "passed_on"),
    [
        ([], []),
        (["--", "-k", "clocks"], ["-k", "clocks"]),
        (["tests/unit", "-x"], ["tests/unit", "-x"]),
        (["--", "-k", "--"], ["-k", "--"]),
    ],
)
def test_pytest_gets_its_arguments(dev: Any, line: list[str], passed_on: list[str]) -> None:
    arguments = dev.parser().parse_args(["test", *line])
    assert dev.without_separator(arguments.pytest_args) == passed_on


def test_sets_up_anew_when_the_pins_change(
    dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\n", encoding="utf-8")
    monkeypatch.setattr(dev, "CONSTRAINTS", pins)
    before = dev.fingerprint()
    assert dev.fingerprint() == before
    pins.write_text("torch==2.14.0\n", encoding="utf-8")
    assert dev.fingerprint() != before


def test_demo_overwrites_no_trace(dev: Any, tmp_path: Path) -> None:
    wanted = tmp_path / "trace"
    assert dev.new_directory(wanted) == wanted
    wanted.mkdir()
    (tmp_path / "trace-2").mkdir()
    assert dev.new_directory(wanted) == tmp_path / "trace-3"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
def test_status_comes_back(dev: Any, program: str, status: int) -> None:
    assert dev.run([sys.executable, "-c", program]) == status


def test_says_how_to_get_ensurepip(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Debian without python3-venv, for a user who is not root."""
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(dev.os, "geteuid", lambda: 1000)
    with pytest.raises(dev.SetupError, match=r"apt-get install python3\.\d+-venv"):
        dev.require_ensurepip()


def test_checks_that_fail_make_the_run_fail(
    dev: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when all tests pass: the run is failed, and says so after pytest's summary."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> int:
        commands.append(command)
        return int("format" in command)

    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(dev, "check_all_types", lambda: 0)
    monkeypatch.setattr(dev, "lint_javascript", lambda: 1)
    monkeypatch.setattr(dev, "install_clients", lambda: False)
    monkeypatch.setattr(dev, "install_system_tools", lambda: None)
    assert dev.test(["-x"], quick=False, all_cases=False, coverage=False) == 1
    assert commands[-1][-1] == "-x"
    assert "tests/unit" not in commands[-1]
    failed = "failed: format, installation of the clients, JavaScript lint"
    assert failed in capsys.readouterr().out


def test_a_quick_run_has_the_unit_tests_only(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(dev, "run", lambda command, **_: commands.append(command) or 0)
    arguments = dev.parser().parse_args(["test", "--quick", "--all", "--", "-k", "clocks"])
    assert arguments.quick
    assert arguments.all_cases
    assert not arguments.coverage
    passed_on = dev.without_separator(arguments.pytest_args)
    assert dev.test(passed_on, quick=True, all_cases=True, coverage=False) == 0
    (tests,) = [command for command in commands if "pytest" in command]
    assert tests[tests.index("-n") :] == [
        *("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"),
        *("tests/unit", "--all-cases", "-k", "clocks"),
    ]


def test_needs_no_library() -> None:
    """It runs before anything is installed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "dev.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
