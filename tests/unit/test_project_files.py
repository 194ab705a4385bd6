"""The files that a release and CI use: site, release notes, pinned hooks and actions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import scripts

import ddltrace

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="dev.py setup installs it")
    dev = scripts.load(ROOT / "dev.py")
    command = [sys.executable, *dev.SITE, str(ROOT), str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.stem for path in (tmp_path / "site").rglob("*.html")}
    assert {path.stem for path in ROOT.glob("docs/*.md")} <= pages
    target = re.search(r"url=(\S+)\"", (tmp_path / "site" / "index.html").read_text())
    assert target is not None
    assert (tmp_path / "site" / target[1]).is_file()


def test_release_notes_are_a_version_of_the_changelog() -> None:
    release_notes = scripts.load(ROOT / ".github" / "release_notes.py")
    text = "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- New.\n\n## [0.1.0]\n\n- Old.\n"
    assert release_notes.notes(text, "v0.2.0") == "### Added\n\n- New.\n"
    assert release_notes.notes(text, "0.1.0") == "- Old.\n"
    for version in ("v0.2", "v0.3.0"):
        with pytest.raises(SystemExit, match="no entries"):
            release_notes.notes(text, version)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^(## \[|Becomes ){re.escape(ddltrace.__version__)}", changelog, re.MULTILINE
    )


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_hooks_run_the_version_that_ci_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^ruff==(\S+)$", constraints, re.MULTILINE)
    assert pinned is not None
    assert f"ruff-pre-commit\n    rev: v{pinned[1]}\n" in hooks
    assert ".venv" not in hooks


def test_editors_and_type_checkers_see_the_package_as_python_does() -> None:
    dev = scripts.load(ROOT / "dev.py")
    top = {path.name for path in (ROOT / "package-root").iterdir()} - {"__pycache__"}
    links = {path.name: path for path in (ROOT / "src" / "ddltrace").iterdir()}
    links.pop("__pycache__", None)
    assert set(links) == top | set(dev.PACKAGES)
    for name, link in links.items():
        assert link.is_symlink()
        original = ROOT / ("package-root" if name in top else "") / name
        assert link.resolve() == original
        assert not Path(os.readlink(link)).is_absolute()


def test_python_started_in_a_clone_imports_the_installed_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import ddltrace; print(ddltrace.__file__)"],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "src")
