"""Composes codecs with their modifiers, and reads codecs from specs."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.entries import TECHNIQUES
from ddltrace.experiments.codecs.feedback import Modifier
from ddltrace.experiments.grammar import MODIFIER, Grammar

_GRAMMAR: Final = Grammar("codec", TECHNIQUES, {})


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


def read(spec: str) -> CodecDescription:
    """The codec that a spec such as ``topk:density=0.01+feedback`` describes.

    Args:
        spec: Name and parameters of a codec, alone or with a modifier.

    Raises:
        UsageError: The spec is not valid, or names another technique than codecs.
    """
    values = {key: named.value for key, named in _GRAMMAR.read(spec).items()}
    try:
        codec = compose(values.get("volume"), values.get(MODIFIER))
    except ValueError as error:
        raise _GRAMMAR.error(spec, str(error)) from error
    assert codec is not None  # a spec names a codec, or a modifier that makes one
    return codec
