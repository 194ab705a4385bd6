"""The base class of frequency techniques."""

from __future__ import annotations

from typing import ClassVar, Literal

Exchanged = Literal["gradients", "parameters", "momentum"]


class Frequency:
    """A pure description of when ranks exchange, and what.

    Attributes:
        exchanges: What the ranks exchange.
    """

    exchanges: ClassVar[Exchanged]

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat; 1 if all steps have the same."""
        return 1

    @property
    def opening_steps(self) -> int:
        """Steps at the start in which it does something else than from then on."""
        return 0
