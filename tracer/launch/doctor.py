"""Checks what can be recorded on this machine, by recording a small job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.optional_packages import EXTRAS, USES, missing_packages

_TIMEOUT_S = 120

# A job of one rank that produces every kind of event that `_injection` looks for.
_PROBE = """
import os, tempfile
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
import torch, torch.distributed as dist
store = "file://" + tempfile.mktemp()
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""

_VERSIONS = """
import json, sys
found = {"python": sys.version.split()[0], "flags": [sys.flags.isolated, sys.flags.no_site]}
try:
    import torch, torch.distributed as dist
    found["torch"] = torch.__version__
    found["distributed"] = dist.is_available()
    if dist.is_available():
        found["gloo"] = dist.is_gloo_available()
        found["nccl"] = dist.is_nccl_available()
        found["mpi"] = dist.is_mpi_available()
    found["cuda"] = torch.cuda.is_available() and torch.cuda.get_device_name(0)
except Exception as error:
    found["torch_error"] = repr(error)[:200]
print(json.dumps(found))
"""

_BUILD = """
import json
from ddltrace.tracer.native import build as native_build
from ddltrace.tracer.errors import MissingCapabilityError
library, why = native_build.installed(), None
if library is None:
    try:
        library = native_build.build()
    except MissingCapabilityError as error:
        why = str(error)
no_compiler = native_build.compiler() is None
print(json.dumps({"library": str(library), "why": why, "no_compiler": no_compiler}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: What was checked.
        state: ``ok``; ``missing`` if jobs cannot be traced without it; ``absent`` if a feature is
            unavailable without it.
        detail: What was found.
        remedy: How to install what is missing; empty if nothing is.
    """

    subject: str
    state: str
    detail: str
    remedy: str = ""


def examine(interpreter: str) -> list[Finding]:
    """Checks an interpreter and this machine.

    Args:
        interpreter: Path or name of the Python that runs the user's jobs.

    Returns:
        The findings, in display order.

    Raises:
        UsageError: The interpreter does not exist.
    """
    path = shutil.which(interpreter)
    if path is None:
        raise UsageError(f"no such interpreter: {interpreter}")
    return [*_packages(), *_torch(path), *_injection(path), *_native(path), *_machine()]


def _packages() -> Iterator[Finding]:
    yield Finding(
        "ddltrace", "ok", f"{metadata.version('ddltrace')}, Python {sys.version.split()[0]}"
    )
    for name in ("pyarrow", "numpy"):
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", f"pip install {name}")
    for extra, packages in EXTRAS.items():
        if missing := missing_packages(extra):
            yield Finding(
                f"[{extra}]",
                "absent",
                f"not installed: {', '.join(missing)} ({USES[extra]})",
                f"pip install 'ddltrace[{extra}]'",
            )
        else:
            names = (name.partition("[")[0] for name in packages)  # dask[distributed]
            versions = ", ".join(f"{name} {_version(name)}" for name in names)
            yield Finding(f"[{extra}]", "ok", f"{versions} ({USES[extra]})")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # its module is there, of another package or build
        return "of another source"


def _torch(python: str) -> Iterator[Finding]:
    output = _run([python, "-c", _VERSIONS], os.environ.copy())
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        yield Finding("the job's Python", "missing", f"{python} does not run: {output:.120}")
        return
    yield Finding("the job's Python", "ok", f"{found['python']} at {python}")
    if "torch" not in found:
        reason = found.get("torch_error", "?")
        yield Finding("torch", "missing", reason, f"{python} -m pip install torch")
        return
    version = tuple(int(part) for part in found["torch"].split(".")[:2])
    if version < (2, 6):
        yield Finding("torch", "missing", f"{found['torch']} is too old", "install torch >= 2.6")
    else:
        yield Finding("torch", "ok", found["torch"])
    backends = [name for name in ("gloo", "nccl", "mpi") if found.get(name)]
    yield Finding("backends", "ok" if backends else "missing", ", ".join(backends) or "none")
    if found.get("cuda"):
        yield Finding("GPU", "ok", str(found["cuda"]))
    else:
        yield Finding("GPU", "absent", "none visible: CPU jobs only")


def _injection(python: str) -> Iterator[Finding]:
    """Traces a job of one rank and checks the events in its trace."""
    from ddltrace.tracer.launch.launcher import environment_of_job
    from ddltrace.tracer.trace.event_reader import read_events
    from ddltrace.tracer.trace.finalize import finalize
    from ddltrace.tracer.trace.run_files import write_run
    from ddltrace.tracer.trace.run_info import RunInfo

    with tempfile.TemporaryDirectory(prefix="ddltrace-doctor-") as name:
        directory = Path(name)
        config = CaptureConfig(directory=directory)
        write_run(directory, RunInfo())
        output = _run([python, "-c", _PROBE], environment_of_job(config))
        run = finalize(directory, RunInfo())
        words = sorted(directory.glob("untraced-*.txt"))
        if not run.ranks:
            reason = words[0].read_text(encoding="utf-8") if words else output.strip()[-160:]
            yield Finding(
                "capture",
                "missing",
                f"a probe job was not traced: {reason}",
                f"{python} -m pip install ddltrace",
            )
            return
        table, _ = read_events(directory, run.ranks[0].segment)
        kinds = set(table["kind"].to_pylist())
        wanted = {"step", "phase", "layer", "gradient", "message", "wait"}
        if run.ranks[0].errors or not wanted <= kinds:
            what = run.ranks[0].errors or [f"no {', '.join(sorted(wanted - kinds))}"]
            yield Finding("capture", "missing", f"a probe job was traced in part: {what[0]}")
            return
        yield Finding("capture", "ok", f"a probe job was traced: {', '.join(sorted(wanted))}")


def _native(python: str) -> Iterator[Finding]:
    """Checks that the C++ library is compiled, or can be, for the job's PyTorch."""
    subject = "recording in C++"
    output = _run([python, "-c", _BUILD], os.environ.copy())
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return  # no torch or no ddltrace: reported above
    if found["why"] is None:
        yield Finding(subject, "ok", f"compiled for this PyTorch: {found['library']}")
    else:
        yield Finding(
            subject,
            "absent",
            f"{found['why']}: recording on the CPU costs more",
            "install a C++ compiler (Debian: apt-get install g++)" if found["no_compiler"] else "",
        )


def _machine() -> Iterator[Finding]:
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        yield Finding(
            "emulated network",
            "absent",
            f"no {' and '.join(tools)}",
            "install iproute2 (Debian: apt-get install iproute2)",
        )
    elif os.geteuid() != 0:
        yield Finding("emulated network", "absent", "needs root", "run as root: sudo ...")
    else:
        yield Finding("emulated network", "ok", "root and iproute2: experiment run --hosts N")


def _run(command: list[str], environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    return done.stdout if done.returncode == 0 else done.stderr
