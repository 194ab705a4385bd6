"""Makes reads of gradients and parameters wait for pending averages and updates.

A schedule that waits layer by layer leaves gradients in flight after backward, and updates
undone after the optimizer's step. A job that reads ``parameter.grad`` between the two (to clip
gradients, to unscale them, to log their norm) has to see the average, and a job that copies or
lists parameters after the step (a checkpoint, a moving average) their updated values. Therefore
``Parameter.grad`` and ``Parameter.data`` become properties, and the functions of `nn.Module` that
return or load parameters first apply pending updates.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

_RAW: Final[Any] = torch._C.TensorBase.grad
_RAW_DATA: Final[Any] = torch._C.TensorBase.data
_gradients: Final[dict[int, tuple[weakref.ref[nn.Parameter], Callable[[], None]]]] = {}
_values: Final[dict[int, Callable[[], None]]] = {}
_installed: Final[list[bool]] = []
_unwatched: Final = threading.local()


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets a gradient without waiting for pending averages."""
    _RAW.__set__(parameter, gradient)


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The current gradient, even if its average is pending."""
    gradient: torch.Tensor | None = _RAW.__get__(parameter)
    return gradient


def wait_when_read(parameter: nn.Parameter, settle: Callable[[], None]) -> None:
    """Registers a function to call before the job next reads or sets a parameter's gradient.

    Args:
        parameter: The parameter.
        settle: Waits for the gradient and sets it.
    """
    install()
    _gradients[id(parameter)] = (weakref.ref(parameter), settle)


def wait_no_more(parameter: nn.Parameter) -> None:
    """Reverts `wait_when_read`."""
    _gradients.pop(id(parameter), None)


def update_when_read(model: object, settle: Callable[[], None]) -> None:
    """Registers a function to call before a model's parameters are next returned.

    Args:
        model: The model; one function is kept for each.
        settle: Applies the model's updates that are due.
    """
    install()
    _values[id(model)] = settle


def updated(model: object) -> None:
    """Reverts `update_when_read`."""
    _values.pop(id(model), None)


def install() -> None:
    """Installs the property and the wrappers, once in a process."""
    if _installed:
        return
    _installed.append(True)
    parameter: Any = nn.Parameter
    parameter.grad = property(_get, _set, _delete)
    parameter.data = property(_settling(_RAW_DATA.__get__), _settling(_RAW_DATA.__set__))
    module: Any = nn.Module
    for owner, name in (
        (parameter, "__deepcopy__"),
        (parameter, "__reduce_ex__"),
        (module, "named_parameters"),
        (module, "state_dict"),
        (module, "load_state_dict"),
    ):
        setattr(owner, name, _settling(getattr(owner, name)))
    module.zero_grad = _passing(module.zero_grad)


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def settled(*args: Any, **kwargs: Any) -> Any:
        if _values and not getattr(_unwatched, "now", False) and not _asked_by_tracer(2):
            for settle in list(_values.values()):
                settle()
        return original(*args, **kwargs)

    return settled


def _passing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that lists parameters, but does not read them."""

    @functools.wraps(original)
    def passing(*args: Any, **kwargs: Any) -> Any:
        with unwatched():
            return original(*args, **kwargs)

    return passing


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Lets the code inside read parameters as they are."""
    former = getattr(_unwatched, "now", False)
    _unwatched.now = True
    try:
        yield
    finally:
        _unwatched.now = former


def _asked_by_tracer(depth: int) -> bool:
    # The tracer reads gradients for their addresses, which must not make the job wait.
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith("ddltrace.tracer.")


def _settle_gradient(parameter: torch.Tensor) -> None:
    entry = _gradients.get(id(parameter))
    if entry is None or entry[0]() is not parameter or _asked_by_tracer(3):
        return
    del _gradients[id(parameter)]
    entry[1]()


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    _settle_gradient(parameter)
    return raw_gradient(parameter)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _settle_gradient(parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: torch.Tensor) -> None:
    _settle_gradient(parameter)
    _RAW.__delete__(parameter)
