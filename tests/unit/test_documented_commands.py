"""Every command that a page shows is accepted by the command line; those on sample traces run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddltrace.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "sample_traces" / "README.md")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown(page: Path) -> list[str]:
    """The ``ddltrace`` commands in the blocks of a page, each whole."""
    lines = [
        re.split(r" [>|] ", line)[0].strip().removeprefix("$ ")  # without the shell's part
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in re.sub(r"\\\n\s*", " ", block).splitlines()
    ]
    return [line for line in lines if re.match(r"ddltrace [a-z]", line)]


def mentioned(page: Path) -> list[str]:
    """The ``ddltrace`` commands in the sentences of a page, which may omit their arguments."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    codes = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose)]
    return [code for code in codes if re.match(r"ddltrace [a-z]", code)]


def parse(line: str) -> None:
    """Parses a command without executing it.

    Raises:
        click.ClickException: The command line does not accept it.
    """
    arguments = shlex.split(line, comments=True)[1:]
    context = click.Context(cli, info_name="ddltrace")
    command: click.Command | None = cli
    while isinstance(command, click.Group) and arguments:
        name = arguments.pop(0)
        command = command.get_command(context, name)
        if command is None:
            raise click.NoSuchOption(name, f"no such command: {name}")
        if isinstance(command, click.Group):
            context = click.Context(command, parent=context, info_name=name)
    if command is not None and not isinstance(command, click.Group):
        command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    refused = {}
    for line in shown(page):
        try:
            parse(line)
        except click.ClickException as error:
            if "does not exist" not in error.format_message():  # the reader's own files
                refused[line] = error.format_message()
    for line in mentioned(page):
        try:
            parse(line)
        except click.NoSuchOption as error:
            refused[line] = error.format_message()
        except click.ClickException:
            pass  # arguments are left out
    assert refused == {}


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert len([line for page in PAGES for line in shown(page)]) > 20
    assert len([line for page in PAGES for line in mentioned(page)]) > 100
    for line in (
        "ddltrace analyse trace",
        "ddltrace analyze trace --fast",
        "ddltrace experiment x",
    ):
        with pytest.raises(click.NoSuchOption):
            parse(line)


RUN = sorted(
    {
        shlex.join(shlex.split(line, comments=True))
        for page in PAGES
        for line in shown(page)
        if "sample_traces/" in line and not line.startswith(("ddltrace dashboard", "ddltrace run"))
    }
)


@pytest.mark.parametrize("line", RUN)
def test_commands_on_sample_traces_run(line: str) -> None:
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
