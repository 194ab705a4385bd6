"""What a job says of the work of its processes (`ddltrace.tracer.capture.process_role`).

`tests/integration/test_roles.py` tries it with actors of Ray.
"""

from __future__ import annotations

import pytest

from ddltrace.tracer.capture.process_role import process_role


@pytest.mark.parametrize(
    ("variables", "role"),
    [
        ({}, None),
        ({"DDLTRACE_ROLE": ""}, None),
        ({"ROLE_NAME": "trainer"}, None),  # not TorchElastic's
        ({"TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "default"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "trainer"}, "trainer"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "trainer", "DDLTRACE_ROLE": "critic"},
            "critic",
        ),
        ({"DDLTRACE_ROLE": "x" * 1000}, "x" * 80),
    ],
)
def test_role_by_environment(monkeypatch, variables, role):
    for name in ("DDLTRACE_ROLE", "TORCHELASTIC_RUN_ID", "ROLE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_role() == role
