"""What all tests share."""

from __future__ import annotations

import contextlib

import pytest

from ddltrace.tracer import gloo_messages_build
from ddltrace.tracer.errors import MissingCapabilityError


@pytest.fixture(autouse=True, scope="session")
def _compiled() -> None:
    """Compiles what the first traced job would: which one that is must make no difference."""
    if gloo_messages_build.is_wanted():
        with contextlib.suppress(MissingCapabilityError):
            gloo_messages_build.build()
