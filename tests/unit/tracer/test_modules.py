"""How modules are called where their calls are recorded."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddltrace.tracer.interpose.modules import _only_chooses


def test_a_call_that_does_more_than_to_choose_is_not_passed_by() -> None:
    original = nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1  # type: ignore[operator]
        return self._call_impl(*args, **kwargs)

    assert _only_chooses(original), "PyTorch's own does something else now: see what"
    assert not _only_chooses(counted)
    assert not _only_chooses(print)
