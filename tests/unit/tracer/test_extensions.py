"""What a package above registers is found, and without it the rest works."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ddltrace.tracer import extensions
from ddltrace.tracer.extensions import GROUP, extension

WITHOUT_EXPERIMENTS = """
import sys
sys.modules["ddltrace.experiments"] = None
from ddltrace.cli import main
main()
"""


def without_experiments(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `ddltrace` in an interpreter that does not find the package of experiments."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXPERIMENTS, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "options",
    [("--strategy", "p3"), ("--steps", "3"), ("--hosts", "2", "--bandwidth", "1gbit")],
)
def test_an_option_of_a_package_that_is_not_there_is_refused_in_one_line(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    done = without_experiments("run", "-o", str(tmp_path / "t"), *options, "--", "true")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{options[0]} needs the package ddltrace.experiments" in done.stderr
    assert not (tmp_path / "t").exists()


def registered(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Makes a module the only one that is registered."""
    entry = EntryPoint("mine", module, GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [entry])
    extensions.extension.cache_clear()


def test_an_error_inside_of_an_extension_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_extension.py").write_text("import not_installed_anywhere")
    registered(monkeypatch, "my_extension")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        extension("mine")
    registered(monkeypatch, "my_package.my_extension")
    assert extension("mine") is None
    extensions.extension.cache_clear()
