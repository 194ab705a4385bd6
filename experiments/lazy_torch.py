"""PyTorch, imported at its first use.

A technique's file holds its description, which commands read without PyTorch, and its torch code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """Stands for the module; keeps what was read, so that a second read costs as usual."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = self.__dict__[name] = getattr(torch, name)
            return value

    torch = _Torch()
