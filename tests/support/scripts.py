"""Python files outside of the package, such as scripts of the repository and jobs, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]


def load(path: Path) -> Any:
    """Imports a file as a module of the name of its path.

    Args:
        path: The file.
    """
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
