"""Determines where each parameter is first needed in a forward pass, and calls a function
before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class LayerOrder:
    """Calls a function before the forward of each layer, with the parameters that it needs.

    A parameter is needed by the modules that hold it, and by the module that was seen to use it
    first: attention, for one, uses its output projection without calling it, and tied weights
    are used by modules that do not hold them. The first forward passes are watched for that.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        before_layer: Callable[[list[int]], None],
    ) -> None:
        """Watches the model's forward passes.

        Args:
            parameters: Its trainable parameters.
            before_layer: Called with the indices of the parameters that a layer needs.
        """
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._before_layer = before_layer
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._holders: dict[str, list[int]] = {}
        for name, module in model.named_modules():
            held = [
                self._index_of[id(parameter)]
                for parameter in module.parameters(recurse=False)
                if id(parameter) in self._index_of
            ]
            if held:
                self._holders[name] = held
        self._indices: dict[int, list[int]] = {}
        self._stack: list[str] = []
        self._called: dict[str, list[int]] = {}  # parameters first used inside, by module
        self._used: dict[int, None] = {}  # in the order of use
        self._mode: _Watching | None = None
        # Hooks for all modules of the process, not hooks of the modules: those would be copied
        # and pickled with the model.
        self._hooks: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def uses(self) -> list[int]:
        """The place of each parameter in the order of use, by the first forward passes."""
        order = dict(self._used)
        for indices in self._needed().values():
            order.update(dict.fromkeys(indices))
        order.update(dict.fromkeys(range(len(self._index_of))))
        places = {index: place for place, index in enumerate(order)}
        return [places[index] for index in range(len(places))]

    def adopt(self) -> None:
        """Starts calling `before_layer`, in the order observed so far."""
        needed = self._needed()
        self.close()
        self._indices = {
            id(module): needed[name]
            for name, module in self._model.named_modules()
            if name in needed
        }
        self._hooks = [register_module_forward_pre_hook(self._call)]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _needed(self) -> dict[str, list[int]]:
        """The parameters that each called module needs, by its name, in the order of calls."""
        needed = {name: dict.fromkeys(indices) for name, indices in self._called.items()}
        seen = {index for indices in self._called.values() for index in indices}
        for name, held in self._holders.items():
            if name in self._called:
                needed[name].update(dict.fromkeys(held))
                seen.update(held)
        for name, held in self._holders.items():
            around = name
            while around and around not in self._called:
                around = around.rpartition(".")[0]
            left = [index for index in held if index not in seen]
            needed.setdefault(around, {}).update(dict.fromkeys(left))
        return {name: list(indices) for name, indices in needed.items() if indices}

    def _enter(self, module: nn.Module, inputs: object) -> None:
        del inputs
        name = self._names.get(id(module))
        if name is None:
            return
        if not self._stack:
            self._mode = _Watching(self._note_use)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append(name)
        self._called.setdefault(name, [])

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        del inputs, output
        name = self._names.get(id(module))
        if name is None:
            return
        # A module that raised may have left others behind.
        while self._stack and self._stack.pop() != name:
            pass
        if not self._stack and self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _note_use(self, tensor: torch.Tensor) -> None:
        index = self._index_of.get(id(tensor))
        if index is not None and index not in self._used and self._stack:
            self._used[index] = None
            self._called[self._stack[-1]].append(index)

    def _call(self, module: nn.Module, inputs: object) -> None:
        del inputs
        indices = self._indices.get(id(module))
        if indices is not None:
            self._before_layer(indices)


class _Watching(TorchFunctionMode):
    """Reports every parameter that an operation reads."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reading a property, such as the element type, does not read the values.
        if getattr(func, "__name__", "") != "__get__":
            for argument in (*args, *(kwargs or {}).values()):
                for item in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(item, nn.Parameter):
                        self._note(item)
        return func(*args, **(kwargs or {}))
