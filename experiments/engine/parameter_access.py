"""Makes every use of gradients and parameters wait for pending averages and updates.

A schedule that waits layer by layer leaves gradients in flight after backward, and updates
undone after the optimizer's step. A job that reads ``parameter.grad`` (to clip gradients, to
unscale them, to log their norm) has to see the average, and a job that uses a parameter before
the next forward pass (a moving average, weight clipping, a checkpoint) its updated values, however
it has got hold of the parameter.

``Parameter.grad`` therefore becomes a property. A parameter whose update is due gets a class whose
`__torch_function__` updates it before the first function that uses its values; then it has its own
class again, so that parameters without a due update cost nothing. Other tensors may share the
parameter's memory (a view that the job has kept, an entry of a ``state_dict``, a NumPy array): the
number of tensors that use a storage shows that, and such a parameter is not left without its
update. What PyTorch does not see, such as a pointer that C++ code has kept, is not covered.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

_RAW: Final[Any] = torch._C.TensorBase.grad
_gradients: Final[dict[int, tuple[weakref.ref[nn.Parameter], Callable[[], None]]]] = {}
_updates: Final[dict[int, Callable[[], None]]] = {}
_installed: Final[list[bool]] = []

_ALIASES: Final = frozenset(
    getattr(torch.Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")
)
"""The properties of a tensor that give its values; others tell what kind of tensor it is."""
_WITHOUT_VALUES: Final[frozenset[Any]] = frozenset(
    {
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("dim", "element_size", "get_device", "is_complex", "is_contiguous"),
                *("is_floating_point", "nelement", "numel", "register_hook", "requires_grad_"),
                *("register_post_accumulate_grad_hook", "size", "stride"),
            )
        ),
        *(torch.empty_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    }
)


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
        settle: Waits for the gradient and sets it.
    """
    if not _installed:
        _installed.append(True)
        owner: Any = nn.Parameter
        owner.grad = property(_get, _set, _delete)
    _gradients[id(parameter)] = (weakref.ref(parameter), settle)


def wait_no_more(parameter: nn.Parameter) -> bool:
    """Reverts `wait_when_read`; returns whether a function was registered."""
    return _gradients.pop(id(parameter), None) is not None


def update_when_used(parameter: nn.Parameter, update: Callable[[], None]) -> None:
    """Registers a function to call before a parameter's values are next read or written.

    Args:
        update: Updates it and calls `updated`; in the thread that uses the parameter.
    """
    _updates[id(parameter)] = update
    parameter.__class__ = _due_class(updated(parameter))


def updated(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Reverts `update_when_used`; returns the parameter's own class."""
    own = type(parameter)
    if issubclass(own, _Due):
        own = own.own_class
        parameter.__class__ = own
    return own


def sharing_memory(
    parameters: Mapping[int, nn.Parameter], model: Sequence[nn.Parameter]
) -> set[int]:
    """The keys of parameters whose memory other tensors than the model's parameters use."""
    found = {key for key, parameter in parameters.items() if _users(parameter) > 1}
    if found:
        own = Counter(map(_storage, model))
        found = {k for k in found if _users(parameters[k]) > own[_storage(parameters[k])]}
    return found


def _storage(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        address: int = parameter.untyped_storage()._cdata
        return address


def _users(parameter: torch.Tensor) -> int:
    """How many tensors share a parameter's memory, itself included."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = parameter.untyped_storage()
        count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # without `storage`


class _Due:
    """What a parameter's class has before its own while an update is due."""

    own_class: type[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del classes
        kwargs = kwargs or {}
        if _uses_values(function) and not _asked_by_tracer(2):
            for parameter in _due_in((args, kwargs)):
                _update(parameter)
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _update(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _update(self).__reduce_ex__(protocol)


@functools.cache
def _due_class(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter whose update is due."""
    made: type[nn.Parameter] = types.new_class(own.__name__, (_Due, own))
    made.own_class = own  # type: ignore[attr-defined]
    return made


def _update(parameter: Any) -> Any:
    _updates[id(parameter)]()
    updated(parameter)
    return parameter


def _due_in(value: Any) -> Iterator[_Due]:
    if isinstance(value, _Due):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _due_in(item)
    elif isinstance(value, dict):
        yield from _due_in(list(value.values()))


def _uses_values(function: Any) -> bool:
    if getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return function.__self__ in _ALIASES
    return function not in _WITHOUT_VALUES


def _asked_by_tracer(depth: int) -> bool:
    # The tracer reads gradients for their addresses, which must not make the job wait.
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith("ddltrace.tracer.")


def _settle_gradient(parameter: torch.Tensor) -> None:
    entry = _gradients.get(id(parameter))
    if entry is None or entry[0]() is not parameter or _asked_by_tracer(3):
        return
    if isinstance(parameter, _Due) and _sets_to_none(3):
        return
    del _gradients[id(parameter)]
    entry[1]()


def _sets_to_none(depth: int) -> bool:
    """Whether `zero_grad` asks for a gradient only to remove it."""
    frame = sys._getframe(depth)
    return frame.f_code.co_name == "zero_grad" and bool(frame.f_locals.get("set_to_none"))


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    _settle_gradient(parameter)
    return raw_gradient(parameter)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None and isinstance(parameter, _Due):
        _gradients.pop(id(parameter), None)  # the update has its gradient
    else:
        _settle_gradient(parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: torch.Tensor) -> None:
    _settle_gradient(parameter)
    _RAW.__delete__(parameter)
