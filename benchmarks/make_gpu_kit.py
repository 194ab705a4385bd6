#!/usr/bin/env python3
"""Writes a folder that installs, tests and measures ddltrace on a machine without network.

It contains ddltrace and its dependencies as wheels, the GPU tests, the GPU benchmark and `run.sh`,
which runs all of them. The machine brings PyTorch, and numpy with it. The wheels alone are what an
air-gapped cluster needs.

Examples:
  python3 dev.py gpu-kit --python 3.12 --output gpu-kit
  bash gpu-kit/run.sh --budget 480                  on the machine with the GPU
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
BRINGS_NUMPY: Final = "numpy"  # PyTorch does
TEST_TOOLS: Final = ("pytest", "iniconfig", "packaging", "pluggy", "pygments")
GLIBC: Final = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
OLD_NAMES: Final = ("2014", "2010", "1")
FILES: Final = (
    *("benchmarks/gpu.py", "tests/gpu/test_gpu_capture.py", "tests/gpu/nccl_job.py"),
    *("tests/support/scripts.py", "tests/support/gpu_checks.py", "tests/support/__init__.py"),
)
MAX_BYTES: Final = 50 << 20
SMALL_PYARROW: Final = "pyarrow>=15,<23"
"""The wheels of later versions leave no room for the rest; every one reads and writes the same."""


def main() -> int:
    """Writes the folder; returns 1 with a line on stderr if it cannot."""
    options = parser().parse_args()
    output: Path = options.output
    if output.exists() and any(output.iterdir()):
        return fail(f"{output} is not empty: choose another --output")
    wheels = output / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)]
    if subprocess.run(build, check=False).returncode:
        return fail("the wheel of ddltrace could not be built, see above")
    download = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    download += ["--dest", str(wheels)]
    download += ["--implementation", "cp", "--python-version", options.python]
    for platform in platforms(options.machine):
        download += ["--platform", platform]
    if subprocess.run([*download, *dependencies(), *TEST_TOOLS], check=False).returncode:
        return fail(
            f"not every dependency has a wheel for Python {options.python} on {options.machine}, "
            "see above"
        )
    for name in FILES:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    shutil.copy(ROOT / "benchmarks" / "run_gpu_kit.sh", output / "run.sh")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        return fail(f"{output} has {size >> 20} MiB, more than {MAX_BYTES >> 20}")
    print(f"{size / (1 << 20):.1f} MiB in {output}; on the machine: bash {output}/run.sh")
    return 0


def dependencies() -> list[str]:
    """The requirements of `pip install ddltrace`, without those that PyTorch brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.split(r"\W", each, maxsplit=1)[0]: each for each in project["dependencies"]}
    del wanted[BRINGS_NUMPY]
    return list((wanted | {"pyarrow": SMALL_PYARROW}).values())


def platforms(machine: str) -> list[str]:
    """Names of the platforms whose wheels run on a machine, the newest first."""
    names = [f"manylinux_{glibc}_{machine}" for glibc in GLIBC]
    return [*names, *(f"manylinux{name}_{machine}" for name in OLD_NAMES)]


def fail(reason: str) -> int:
    """Prints why there is no kit; returns 1."""
    print(f"gpu-kit: {reason}", file=sys.stderr)
    return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="dev.py gpu-kit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    top.add_argument("--python", default=here, help="version of the machine's Python (%(default)s)")
    top.add_argument("--machine", default="x86_64", help="its processor (%(default)s)")
    top.add_argument(
        "--output", type=Path, default=Path("gpu-kit"), help="the folder (%(default)s)"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
