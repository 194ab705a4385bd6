"""What all tests share."""

from __future__ import annotations

import contextlib

import pytest

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.native import build as native_build


@pytest.fixture(autouse=True, scope="session")
def _compiled() -> None:
    """Compiles what the first traced job would: which one that is must make no difference."""
    if native_build.is_wanted():
        with contextlib.suppress(MissingCapabilityError):
            native_build.build()
