"""The configuration of a traced process, which the launcher passes to every rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.owner_access import let_owner_use
from ddltrace.tracer.storage.plain_files import open_plain

ENVIRONMENT_VARIABLE: Final = "DDLTRACE_CONFIG"
_MAX_REPORT: Final = 500
COUNTERS_VARIABLE: Final = "DDLTRACE_COUNTERS"
OFF_VARIABLE: Final = "DDLTRACE_OFF"
LEVELS: Final = ("comm", "layer", "op")


def _is_set(variable: str, *, default: bool) -> bool:
    """The value of a variable of the environment that is true or false."""
    text = os.environ.get(variable)
    return default if not text else text.lower() not in ("0", "false", "no", "off")


def read_reports(directory: Path) -> list[str]:
    """Reads the messages of processes that could not record.

    Args:
        directory: Where they were written; it may contain other processes' files, too.

    Raises:
        OSError: The directory cannot be read.
    """
    reports = []
    for path in sorted(directory.glob("untraced-*.txt")):
        with contextlib.suppress(OSError), open_plain(path) as file:
            report = file.read(_MAX_REPORT).decode(errors="replace").strip()
            reports.append("".join(c if c.isprintable() else " " for c in report))
    return reports


@dataclass(frozen=True)
class CaptureConfig:
    """How a rank records.

    Attributes:
        directory: The trace directory, an absolute path.
        level: ``comm`` (messages, waits, phases, steps), ``layer`` (also the forward pass of
            every layer and the readiness of every gradient) or ``op`` (also single operators and
            device kernels, in a window of steps).
        op_steps: The window of level ``op``: its first step and the step after its last.
        measure_cost: Number of steps in which recording alternates between on and off, to
            measure its overhead; 0 to record every step.
        flush_interval_s: Time between two writes: the most that a killed rank can lose.
        buffer_rows: Maximum number of buffered events; further events are dropped and counted.
        reports_directory: A directory that every user may write to; empty if there is none. A
            process that cannot record reports why there, if it cannot write to the trace
            directory.
        counters: Whether to record resource counters.
        off: Whether recording begins switched off.
        attached: Whether the process was armed from outside while the job ran, so that each rank
            begins to count steps and messages at another time.
        triggers: When to record although it is switched off; see `trigger_expression.py`.
        plugin: Full name of a module that every rank loads when it has joined its process
            group, to call the module's ``install(plugin_options)``; empty for none.
        plugin_options: Argument of the plug-in's ``install``.
    """

    directory: Path
    level: str = "layer"
    op_steps: tuple[int, int] = (10, 13)
    measure_cost: int = 0
    flush_interval_s: float = 0.8
    buffer_rows: int = 100_000
    reports_directory: str = ""
    counters: bool = True
    off: bool = False
    attached: bool = False
    triggers: tuple[str, ...] = ()
    plugin: str = ""
    plugin_options: dict[str, Any] = field(default_factory=dict)

    def to_environment(self) -> dict[str, str]:
        """The environment variable that holds the whole configuration."""
        value = {**asdict(self), "directory": str(self.directory)}
        environment = {ENVIRONMENT_VARIABLE: json.dumps(value)}
        if self.level == "op" or self.off:
            # PyTorch's profiler prints a line at each start and stop.
            environment["KINETO_LOG_LEVEL"] = "99"
        return environment

    def prepare_directory(self) -> None:
        """Creates the trace directory if no launcher did: on another host, or without one.

        Raises:
            OSError: It cannot be created.
        """
        from ddltrace.tracer.trace.run_files import write_run
        from ddltrace.tracer.trace.run_info import RunInfo
        from ddltrace.tracer.trace.trace_files import RUN_FILE

        if (self.directory / RUN_FILE).exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        let_owner_use(self.directory)
        # Other ranks may write the same content at the same time.
        run = RunInfo(level=self.level, host=os.uname().nodename, created_unix_ns=time.time_ns())
        write_run(self.directory, run)

    def report_failure(self, error: BaseException) -> None:
        """Reports to the launcher why this process is not traced; never raises."""
        self.report(f"{sys.executable} (pid {os.getpid()}): {type(error).__name__}: {error}")

    def report(self, text: str) -> None:
        """Reports to the launcher why something below it is not traced; never raises."""
        for directory in filter(None, (str(self.directory), self.reports_directory)):
            with contextlib.suppress(OSError):
                path = Path(directory, f"untraced-{os.getpid()}.txt")
                path.write_text(text[:_MAX_REPORT], encoding="utf-8", errors="replace")
                let_owner_use(path)
                return

    @staticmethod
    def in_code(directory: Path | None, level: str, *, off: bool = False) -> CaptureConfig | None:
        """The configuration of a process that records without a launcher.

        Args:
            directory: The trace directory; by default the value of ``DDLTRACE_OUTPUT``.
            level: The level, unless ``DDLTRACE_LEVEL`` is set.
            off: Whether to begin switched off, unless ``DDLTRACE_OFF`` is set.

        Returns:
            The configuration; None if no directory is given.

        Raises:
            UsageError: The level does not exist, or the directory holds other files.
        """
        named = directory or os.environ.get("DDLTRACE_OUTPUT")
        if not named:
            return None
        level = os.environ.get("DDLTRACE_LEVEL", level)
        if level not in LEVELS:
            raise UsageError(f"unknown level {level}: choose one of {', '.join(LEVELS)}")
        path = Path(named).absolute()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a directory")
        # Files that other ranks of the job are writing do not count.
        trace_files = ("run.json", "rank-", "counters-", "nccl-", "untraced-", ".")
        if path.is_dir() and not all(
            entry.name.startswith(trace_files) for entry in path.iterdir()
        ):
            raise UsageError(f"{path} holds other files than a trace: choose another directory")
        return CaptureConfig(
            directory=path,
            level=level,
            counters=_is_set(COUNTERS_VARIABLE, default=True),
            off=_is_set(OFF_VARIABLE, default=off),
        )

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> CaptureConfig | None:
        """The configuration of this process, or None if it is not traced."""
        text = environment.get(ENVIRONMENT_VARIABLE)
        if not text:
            return None
        value = json.loads(text)
        value["directory"] = Path(value["directory"])
        value["op_steps"] = tuple(value["op_steps"])
        value["triggers"] = tuple(value["triggers"])
        return CaptureConfig(**value)
