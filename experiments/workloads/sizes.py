"""Sizes of the built-in models by which they can be divided. Without torch."""

from __future__ import annotations

from typing import Final

HEADS: Final = 4
"""Attention heads of a block of the GPT."""
LAYERS: Final = 2
"""Blocks of the GPT."""
EXPERTS: Final = 4
"""Experts of a block of the GPT with experts."""
