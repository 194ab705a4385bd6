"""The host program that loads NCCL's profiler plugin as NCCL does (`tests/nccl/host.c`)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ddltrace.analyzer.nccl.ring_file import Ring, read_ring
from ddltrace.tracer.nccl.compile_plugin import compile_plugin, compiler
from ddltrace.tracer.trace.trace_files import RING_PATTERN

_SOURCE: Final = Path(__file__).resolve().parents[1] / "nccl" / "host.c"
VERSIONS: Final = (3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Host:
    """A compiled host program and the plugin that it loads.

    Attributes:
        program: The program.
        plugin: The plugin.
    """

    program: Path
    plugin: Path

    def command(self, version: int, scenario: str, number: int = 2) -> list[str]:
        """The command line of a scenario."""
        return [str(self.program), str(self.plugin), str(version), scenario, str(number)]

    def run(
        self,
        folder: Path,
        version: int,
        scenario: str,
        number: int = 2,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a scenario that records into a folder."""
        return subprocess.run(
            self.command(version, scenario, number),
            env=host_environment(folder, **environment),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def host_environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that records into a folder as rank 5."""
    return {
        **{name: value for name, value in os.environ.items() if "NCCL" not in name},
        **{"DDLTRACE_NCCL_DIR": str(folder), "DDLTRACE_NCCL_RECORDS": "8192", "RANK": "5"},
        **more,
    }


@cache
def build_host(sanitizer: str = "") -> Host:
    """Compiles host and plugin, with a sanitizer of the compiler where one is named."""
    folder = Path(tempfile.mkdtemp(prefix="nccl-host-"))
    flags = ["-g", "-Wall", "-Wextra", "-Werror"]
    if sanitizer:
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    with_what = compiler()
    assert with_what is not None
    host = Host(folder / "host", folder / "plugin.so")
    reason = compile_plugin(with_what, host.plugin, flags)
    assert reason is None, reason
    command = [with_what, "-O1", "-std=gnu11", *flags, str(_SOURCE), "-o", str(host.program)]
    command += ["-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return host


def rings_of(folder: Path) -> list[Ring]:
    """The rings in a folder, by their names."""
    return [read_ring(path) for path in sorted(folder.glob(RING_PATTERN))]
