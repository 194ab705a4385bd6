"""Carries a step policy's state in the checkpoints of the job's optimizer.

The state stands under a key of its own beside ``state`` and ``param_groups``, which PyTorch's
`Optimizer.load_state_dict` ignores: a checkpoint can be loaded without the strategy, and one
without the key can be loaded with it. The state dictionary of the model stays as it is.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch.optim import Optimizer

KEY: Final = "ddltrace"
"""Key of the policy's state in a checkpoint of an optimizer."""

_loaded: Final[weakref.WeakKeyDictionary[Optimizer, dict[str, Any]]] = weakref.WeakKeyDictionary()
_installed: Final[list[bool]] = []
on_load: Final[list[Callable[[Optimizer], None]]] = []
"""Called when an optimizer has loaded a checkpoint with such a state."""


def install() -> None:
    """Starts keeping the state of loaded checkpoints, once in a process."""
    if not _installed:
        _installed.append(True)
        kind: Any = Optimizer
        kind.load_state_dict = _keeping(kind.load_state_dict)


def save_with(optimizer: Optimizer, state: Callable[[], dict[str, Any] | None]) -> None:
    """Adds a state to every checkpoint of an optimizer.

    Args:
        optimizer: The optimizer.
        state: Returns the state, or None for none.
    """

    def add(_: Optimizer, checkpoint: dict[str, Any]) -> None:
        value = state()
        if value is not None:
            checkpoint[KEY] = copy.deepcopy(value)

    optimizer.register_state_dict_post_hook(add)


def take_loaded(optimizer: Optimizer) -> dict[str, Any] | None:
    """The state that the optimizer's last loaded checkpoint had; None if it was taken already."""
    return _loaded.pop(optimizer, None)


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> Any:
        result = original(optimizer, state_dict)
        if KEY in state_dict:
            _loaded[optimizer] = copy.deepcopy(state_dict[KEY])
            for call in on_load:
                call(optimizer)
        return result

    return load_state_dict
