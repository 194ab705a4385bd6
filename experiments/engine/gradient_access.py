"""Whoever reads a gradient that is still under way waits for it.

A schedule that waits layer by layer leaves gradients in flight after backward. A job that reads
``parameter.grad`` then (to clip gradients, to unscale them, to log their norm) has to see the
average. So ``Parameter.grad`` becomes a property that waits for it first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

_RAW: Final[Any] = torch._C.TensorBase.grad
_pending: Final[dict[int, tuple[weakref.ref[torch.nn.Parameter], Callable[[], None]]]] = {}
_installed: Final[list[bool]] = []


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets a gradient without waiting for what is under way."""
    _RAW.__set__(parameter, gradient)


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient as it is now, even if it is still under way."""
    gradient: torch.Tensor | None = _RAW.__get__(parameter)
    return gradient


def wait_when_read(parameter: torch.nn.Parameter, settle: Callable[[], None]) -> None:
    """Has a function called before the parameter's gradient is next read or set by the job.

    Args:
        parameter: The parameter.
        settle: Waits for the gradient and sets it.
    """
    _install()
    _pending[id(parameter)] = (weakref.ref(parameter), settle)


def wait_no_more(parameter: torch.nn.Parameter) -> None:
    """Ends what `wait_when_read` began."""
    _pending.pop(id(parameter), None)


def _settle_first(parameter: torch.Tensor) -> None:
    entry = _pending.get(id(parameter))
    if entry is None or entry[0]() is not parameter:
        return
    # The tracer looks at gradients to know their memory; that must not hold up the job.
    if sys._getframe(2).f_globals.get("__name__", "").startswith("ddltrace.tracer."):
        return
    del _pending[id(parameter)]
    entry[1]()


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    _settle_first(parameter)
    return raw_gradient(parameter)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _settle_first(parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: torch.Tensor) -> None:
    _settle_first(parameter)
    _RAW.__delete__(parameter)


def _install() -> None:
    if not _installed:
        _installed.append(True)
        torch.nn.Parameter.grad = property(_get, _set, _delete)  # type: ignore[assignment]
