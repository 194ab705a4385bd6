"""The frequency axis of the catalogue: one entry for each frequency rule."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.strategy.technique import Technique

TECHNIQUES: Final[tuple[Technique, ...]] = ()
