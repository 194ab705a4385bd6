"""The command that is printed at the end can be pasted into a shell."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from ddltrace.tracer.next_command import print_next_command


def test_parameters_of_a_url_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    url = "gs://bucket/a run?anonymous=1&scheme=http"
    print_next_command("analyze", url)
    printed = capsys.readouterr().err
    assert shlex.split(printed.removeprefix("ddltrace: next: ")) == ["ddltrace", "analyze", url]
    assert "'" in printed


def test_plain_paths_are_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    print_next_command("dashboard", "runs/a-1", "runs/b_2")
    assert capsys.readouterr().err == "ddltrace: next: ddltrace dashboard runs/a-1 runs/b_2\n"


@pytest.mark.parametrize("closed", ["2>&-", "2> /dev/full", "2> >(exit)"])
def test_a_message_that_cannot_be_written_changes_no_status(closed: str) -> None:
    code = (
        "import sys, time; time.sleep(0.1)\n"
        "from ddltrace.tracer.next_command import say\n"
        "say('one'); say('two'); sys.exit(7)"
    )
    command = f"{shlex.join([sys.executable, '-c', code])} {closed}"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 7
