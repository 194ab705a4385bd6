"""What a traced process needs to know, handed from the launcher to every rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import UsageError

ENVIRONMENT_VARIABLE: Final = "DDLTRACE_CONFIG"
_MAX_WORD: Final = 500
LEVELS: Final = ("comm", "layer", "op")


def words_in(directory: Path) -> list[str]:
    """Why processes could not record, as they left word of it.

    Args:
        directory: Where; others than they may have written there.

    Raises:
        OSError: It cannot be read.
    """
    words = []
    for path in sorted(directory.glob("untraced-*.txt")):
        if path.is_file() and not path.is_symlink():
            with path.open(encoding="utf-8", errors="replace") as file:
                word = file.read(_MAX_WORD).strip()
            words.append("".join(letter if letter.isprintable() else " " for letter in word))
    return words


@dataclass(frozen=True)
class CaptureConfig:
    """How a rank records.

    Attributes:
        directory: The trace directory, absolute.
        level: ``comm`` (messages, waits, phases, steps) or ``layer`` (also the forward of
            every layer and the readiness of every gradient) or ``op`` (also single operators and
            device kernels, in a window of steps).
        op_steps: The window: first step and the one after the last.
        measure_cost: Number of steps in which recording alternates between on and off, to
            measure its overhead; 0 to record every step.
        flush_interval_s: The time between two writes; a killed rank loses what came since.
        buffer_rows: Events that memory may hold before further ones are dropped and counted.
        words: A directory that every user may write to; empty if there is none. A process that
            cannot record leaves word there, if it cannot write to the trace directory.
    """

    directory: Path
    level: str = "layer"
    op_steps: tuple[int, int] = (10, 13)
    measure_cost: int = 0
    flush_interval_s: float = 0.8
    buffer_rows: int = 100_000
    words: str = ""

    def to_environment(self) -> dict[str, str]:
        """The environment variable that carries the whole configuration."""
        value = {**asdict(self), "directory": str(self.directory)}
        environment = {ENVIRONMENT_VARIABLE: json.dumps(value)}
        if self.level == "op":
            # The profiler's library prints a line at each start and stop.
            environment["KINETO_LOG_LEVEL"] = "99"
        return environment

    def prepare_directory(self) -> None:
        """Makes the trace directory where no launcher has: on another host, or without one.

        Raises:
            OSError: It cannot be made.
        """
        from ddltrace.tracer.trace.run_files import write_run
        from ddltrace.tracer.trace.run_info import RunInfo
        from ddltrace.tracer.trace.trace_files import RUN_FILE

        if (self.directory / RUN_FILE).exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        # Other ranks may do this at the same moment; what they write is the same.
        run = RunInfo(level=self.level, host=os.uname().nodename, created_unix_ns=time.time_ns())
        write_run(self.directory, run)

    def leave_word(self, error: BaseException) -> None:
        """Tells the launcher why this process is not traced; never raises."""
        word = f"{sys.executable} (pid {os.getpid()}): {type(error).__name__}: {error}"
        for directory in filter(None, (str(self.directory), self.words)):
            with contextlib.suppress(OSError):
                path = Path(directory, f"untraced-{os.getpid()}.txt")
                path.write_text(word[:_MAX_WORD], encoding="utf-8", errors="replace")
                return

    @staticmethod
    def in_code(directory: Path | None, level: str) -> CaptureConfig | None:
        """The configuration of a process that records without a launcher.

        Args:
            directory: The trace directory; by default what ``DDLTRACE_OUTPUT`` says.
            level: What to record, unless ``DDLTRACE_LEVEL`` says otherwise.

        Returns:
            The configuration; None if no directory is named.

        Raises:
            UsageError: There is no such level, or the directory holds something else.
        """
        named = directory or os.environ.get("DDLTRACE_OUTPUT")
        if not named:
            return None
        level = os.environ.get("DDLTRACE_LEVEL", level)
        if level not in LEVELS:
            raise UsageError(f"no such level: {level} (there are: {', '.join(LEVELS)})")
        path = Path(named).absolute()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is no directory")
        # What other ranks may be making at this moment is no obstacle.
        own = ("run.json", "rank-", "untraced-", ".")
        if path.is_dir() and not all(entry.name.startswith(own) for entry in path.iterdir()):
            raise UsageError(f"{path} holds something else than a trace: name another directory")
        return CaptureConfig(directory=path, level=level)

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> CaptureConfig | None:
        """The configuration of this process, or None if it is not traced."""
        text = environment.get(ENVIRONMENT_VARIABLE)
        if not text:
            return None
        value = json.loads(text)
        value["directory"] = Path(value["directory"])
        value["op_steps"] = tuple(value["op_steps"])
        return CaptureConfig(**value)
