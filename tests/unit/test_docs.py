"""The documentation cannot drift from the code: the reference page is what the commands say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "docs" / "generate_cli_reference.py"
    spec = importlib.util.spec_from_file_location("generate_cli_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli", "report"])
def test_reference_is_fresh(name: str, tmp_path: Path) -> None:
    # In a process of its own: click keeps the help option that a command was first asked for,
    # and other tests ask commands without their parent.
    page = tmp_path / f"{name}-reference.md"
    script = ROOT / "docs" / f"generate_{name}_reference.py"
    subprocess.run([sys.executable, str(script), str(page)], check=True)
    written = (ROOT / "docs" / page.name).read_text(encoding="utf-8")
    assert written == page.read_text(encoding="utf-8"), "stale: run python3 dev.py docs"


def test_every_key_of_the_json_has_a_meaning() -> None:
    page = (ROOT / "docs" / "report-reference.md").read_text(encoding="utf-8")
    keys = re.findall(r"^- `(\w+)`(.*)$", page, re.MULTILINE)
    assert len(keys) > 150
    assert [key for key, meaning in keys if not meaning.startswith(": ")] == []
    for key in ("late_steps", "steps_share", "late_step_us", "sometimes", "cause_us"):
        assert key in dict(keys)


def test_measures_are_defined_in_words() -> None:
    page = (ROOT / "docs" / "report-reference.md").read_text(encoding="utf-8")
    assert not re.findall(r"\|[A-Z]\||\b[CMWK] [nu] [CMWK]\b", page)
    # Names of Python classes say nothing to a reader of JSON.
    assert set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)[`.]", page)) == {"Analysis", "Memset"}


def test_every_command_and_option_is_documented(generator: ModuleType) -> None:
    sections = dict(
        re.findall(
            r"^## `(.+?)`\n(.*?)(?=^## |\Z)",
            generator.PAGE.read_text(encoding="utf-8"),
            re.MULTILINE | re.DOTALL,
        )
    )
    contexts = list(generator.all_contexts())
    for context in contexts:
        text = sections[context.command_path]
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for option in parameter.opts:
                    assert option in text, f"{context.command_path} {option}"
    assert len(contexts) > 1


def test_every_command_and_option_says_what_it_is_for(generator: ModuleType) -> None:
    for context in generator.all_contexts():
        assert context.command.help, context.command_path
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{context.command_path} {parameter.opts[0]}"


@pytest.mark.parametrize(
    "page",
    [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))],
)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of every page names a file of the repository."""
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:|#", target):
            continue
        assert (path.parent / target.split("#")[0]).exists(), f"{page} links to {target}"
