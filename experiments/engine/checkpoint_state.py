"""Carries the state of a strategy in the checkpoints of the job's optimizer.

The state stands under keys of its own beside ``state`` and ``param_groups``, which PyTorch's
`Optimizer.load_state_dict` ignores: a checkpoint can be loaded without the strategy, and one
without the keys can be loaded with it. The state dictionary of the model stays as it is.

What techniques keep of single parameters in the optimizer is moved there, too: optimizers such as
Adam cannot load a checkpoint in which the state of a parameter lacks their own entries.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ddltrace.experiments.technique import STATE_PREFIX

KEY: Final = "ddltrace"
"""Key of the policy's state in a checkpoint of an optimizer."""

PARAMETERS_KEY: Final = "ddltrace_parameters"
"""Key of what techniques keep of single parameters, by the parameter's number."""

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
        state: Returns the state, or None for none.
    """

    def add(_: Optimizer, checkpoint: dict[str, Any]) -> None:
        _move_out(checkpoint)
        value = state()
        if value is not None:
            checkpoint[KEY] = copy.deepcopy(value)

    optimizer.register_state_dict_post_hook(add)


def take_loaded(optimizer: Optimizer) -> dict[str, Any] | None:
    """The state that the optimizer's last loaded checkpoint had; None if it was taken already.

    What techniques keep of parameters is put back into the optimizer.
    """
    found = _loaded.pop(optimizer, {})
    _move_back(optimizer, found.get(PARAMETERS_KEY, {}))
    state: dict[str, Any] | None = found.get(KEY)
    return state


def _move_out(checkpoint: dict[str, Any]) -> None:
    """Moves what techniques keep of parameters to a key of its own."""
    states: dict[Any, dict[str, Any]] = checkpoint["state"]
    moved: dict[Any, dict[str, Any]] = {}
    for number, entries in list(states.items()):
        own = {key: value for key, value in entries.items() if key.startswith(STATE_PREFIX)}
        if not own:
            continue
        moved[number] = own
        # The optimizer itself still has these entries: its dictionaries are not changed.
        states[number] = {key: value for key, value in entries.items() if key not in own}
        if not states[number]:
            del states[number]
    if moved:
        checkpoint[PARAMETERS_KEY] = moved


def _move_back(optimizer: Optimizer, moved: Mapping[Any, Mapping[str, Any]]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entries in moved.items():
        parameter = parameters[number]
        for key, value in entries.items():
            own = value.to(parameter.device, copy=True) if torch.is_tensor(value) else value
            optimizer.state[parameter][key] = own


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> Any:
        result = original(optimizer, state_dict)
        found: dict[str, Any] = {
            key: state_dict[key] for key in (KEY, PARAMETERS_KEY) if key in state_dict
        }
        if found:
            _loaded[optimizer] = copy.deepcopy(found)
            for call in on_load:
                call(optimizer)
        return result

    return load_state_dict
