"""PyTorch, imported at its first use.

A technique's file holds its description, which commands read without PyTorch, and its torch code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["dist", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:

    class _Lazy:
        """Stands for a module."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    class _Torch(_Lazy):
        """Keeps what was read, so that a second read costs as usual."""

        def __getattr__(self, name: str) -> Any:
            value = self.__dict__[name] = super().__getattr__(name)
            return value

    torch = _Torch("torch")
    dist = _Lazy("torch.distributed")
