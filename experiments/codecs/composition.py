"""Composes codecs with their modifiers."""

from __future__ import annotations

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier


def compose(codec: CodecDescription | None, modifier: Modifier | None) -> CodecDescription | None:
    """A codec with its modifier.

    Args:
        codec: The strategy's codec.
        modifier: The strategy's modifier.

    Returns:
        The description of both together; None if neither is given.

    Raises:
        ValueError: The two cannot be combined.
    """
    return codec if modifier is None else modifier.around(codec)
