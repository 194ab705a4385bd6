"""Where the traces for the readers' tests are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def foreign() -> Path:
    """The folder of recorded traces of other tools."""
    return ROOT / "tests" / "data" / "foreign"


@pytest.fixture(scope="session")
def dlrm() -> Path:
    """Kineto files of a DLRM job on eight GPUs; they lie beside the checkout."""
    path = ROOT.parent / "shared" / "data" / "kineto-dlrm"
    if not path.is_dir():
        pytest.skip(f"no real GPU traces: {path} does not exist")
    return path
