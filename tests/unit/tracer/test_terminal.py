"""Signals of a terminal: a job gets each of them as often as without its launcher."""

from __future__ import annotations

import itertools
import os
import pty
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

# Notes the signals that it gets, and ends at a SIGTERM.
JOB = """
import os, signal, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(number, frame):  # a buffered file raises if a signal comes while it is written
    os.write(log, signal.Signals(number).name.encode() + b"\\n")
    if number == signal.SIGTERM:
        os._exit(5)
for name in ("HUP", "INT", "QUIT", "CONT", "TERM", "ALRM", "XCPU", "USR1", "ABRT", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), note)
os.write(log, f"ready {os.getpid()}\\n".encode())
while True:
    time.sleep(0.005)
"""

LAUNCHER = """
import sys
from ddltrace.tracer.launch.launcher import run_untraced
sys.exit(run_untraced(sys.argv[1:], 0o022))
"""


class Terminal:
    """A session on a terminal of its own, whose leader is a command."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            # Below `nohup`, the tests themselves ignore it, and so would all of these processes.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.execvp(command[0], command)
        self.job = int(self.wait_for(r"ready (\d+)"))

    def wait_for(self, pattern: str) -> str:
        """Waits until the job has written something."""
        deadline = time.monotonic() + 30
        while not (found := re.search(pattern, self.log.read_text())):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)
        return found[1] if found.groups() else found[0]

    def got(self) -> list[str]:
        """The signals that the job has got so far, once it has got those that were sent."""
        os.kill(self.job, signal.SIGUSR1)
        self.wait_for("SIGUSR1")
        return self.log.read_text().split()[2:-1]

    def end(self) -> int:
        """Ends the job; returns the status of the leader."""
        os.kill(self.job, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.descriptor)


def job(folder: Path) -> list[str]:
    return [sys.executable, "-c", JOB, str(folder / "log")]


def launched(folder: Path) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, *job(folder)]


def below(command: list[str], options: str = "") -> list[str]:
    """The same command as a child of a shell, which leads the session and continues it once."""
    text = f"{shlex.join(command)}; status=$?; fg 2> /dev/null || exit $status"
    return ["bash", f"-{options}c", text]


LEADERS: dict[str, Callable[[list[str]], list[str]]] = {
    "alone": lambda command: command,
    "below-shell": below,
    "below-shell-with-job-control": lambda command: below(command, "m"),
}
# What is typed, if the terminal is not closed, and the last signal that comes of it in any case.
KEYS = {
    "Ctrl-C": (b"\x03", "SIGINT"),
    "Ctrl-backslash": (b"\x1c", "SIGQUIT"),
    "Ctrl-Z": (b"\x1a", "ready"),
    "closed": (b"", "SIGCONT"),
}


@pytest.mark.parametrize("leader", LEADERS)
def test_a_job_gets_what_it_gets_without_a_launcher(tmp_path: Path, leader: str) -> None:
    terminals = []
    for key, command in itertools.product(KEYS, (job, launched)):
        folder = tmp_path / f"{key}-{command.__name__}"
        folder.mkdir()
        terminals.append(Terminal(folder, LEADERS[leader](command(folder))))
        typed, last = KEYS[key]
        if typed:
            os.write(terminals[-1].descriptor, typed)
        else:
            terminals[-1].close()
        terminals[-1].wait_for(last)
    time.sleep(0.3)  # a signal too many would come now
    # Of two signals that are sent at once, either may be seen first, also without a launcher.
    got = [sorted(terminal.got()) for terminal in terminals]
    statuses = [terminal.end() for terminal in terminals]
    assert got[::2] == got[1::2]
    assert statuses[::2] == statuses[1::2]
    assert got[0] == ["SIGINT"]
    assert got[-1] == ["SIGCONT", "SIGHUP"]


@pytest.mark.parametrize("name", ["SIGALRM", "SIGXCPU", "SIGABRT", "SIGUSR2"])
def test_what_is_sent_to_the_launcher_alone_reaches_the_job(tmp_path: Path, name: str) -> None:
    terminal = Terminal(tmp_path, launched(tmp_path))
    os.kill(terminal.pid, getattr(signal, name))
    terminal.wait_for(name)
    assert terminal.got() == [name]
    assert terminal.end() == 5


def test_a_timer_that_was_set_before_the_start_ends_the_job(tmp_path: Path) -> None:
    """As `perl -e 'alarm 10; exec @ARGV' COMMAND`."""
    code = "import os, signal, sys; signal.alarm(2); os.execv(sys.argv[1], sys.argv[1:])"
    terminal = Terminal(tmp_path, [sys.executable, "-c", code, *launched(tmp_path)])
    terminal.wait_for("SIGALRM")
    assert terminal.end() == 5
