"""Compiles the plugin. Imports nothing of ddltrace: `setup.py` loads this file by its path."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LIBRARY: Final = "libnccl-profiler-ddltrace.so"
"""The plugin's name in an installed package."""

COMPILERS: Final = ("cc", "gcc", "clang")

_FLAGS: Final = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared")
# Without it, NCCL would unload code that its own threads may still call.
_LINKER_FLAGS: Final = ("-Wl,-z,nodelete",)
_SOURCE: Final = Path(__file__).with_name("plugin.c")
_TIMEOUT_S: Final = 60


def compiler() -> str | None:
    """The C compiler of this machine; None if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def compile_plugin(with_what: str, library: Path, more_flags: Sequence[str] = ()) -> str | None:
    """Compiles the plugin.

    Args:
        with_what: The compiler.
        library: The file to write.
        more_flags: Further options of the compiler.

    Returns:
        Why it failed; None if it is compiled.
    """
    command = [with_what, *_FLAGS, *more_flags, str(_SOURCE), "-o", str(library), *_LINKER_FLAGS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{with_what} takes more than {_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or ["the compiler gave no reason"]
    return next((line for line in lines if "error" in line), lines[0])[:200]
