"""Modules of `benchmarks/` that tests use as well: simulated ranks, messages, generated traces."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

_BENCHMARKS: Final = Path(__file__).resolve().parents[2] / "benchmarks"


def simulated_training() -> ModuleType:
    """The module that trains on simulated ranks."""
    return _benchmark("simulated_training")


def convergence() -> ModuleType:
    """The benchmark itself."""
    return _benchmark("convergence")


def simulated_ranks() -> ModuleType:
    """Ranks as threads of one process."""
    return _benchmark("simulated_ranks")


def codec_messages() -> ModuleType:
    """Encoded messages of one rank."""
    return _benchmark("codec_messages")


def synthetic() -> ModuleType:
    """The module that generates traces with a known answer."""
    return _benchmark("synthetic")


def _benchmark(name: str) -> ModuleType:
    # Benchmarks import each other as scripts do: from their own folder.
    if str(_BENCHMARKS) not in sys.path:
        sys.path.append(str(_BENCHMARKS))
    return importlib.import_module(name)
