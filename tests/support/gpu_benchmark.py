"""The script benchmarks/gpu.py as a module: its jobs are those that the GPU tests check."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

SCRIPT: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def load() -> Any:
    """Imports the script once."""
    name = "ddltrace_benchmarks_gpu"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its dataclasses look themselves up
        spec.loader.exec_module(module)
    return sys.modules[name]
