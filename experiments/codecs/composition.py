"""Codecs composed with their modifiers, and read from specs."""

from __future__ import annotations

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier
from ddltrace.tracer.errors import UsageError


def compose(codec: CodecDescription | None, modifier: Modifier | None) -> CodecDescription | None:
    """A codec with its modifier.

    Args:
        codec: The strategy's codec.
        modifier: The strategy's modifier.

    Returns:
        What encodes; None if neither is given.

    Raises:
        ValueError: The two cannot be combined.
    """
    return codec if modifier is None else modifier.around(codec)


def read(spec: str) -> CodecDescription:
    """The codec that a spec such as ``topk:density=0.01+feedback`` describes.

    Args:
        spec: Of a codec, alone or with a modifier.

    Raises:
        UsageError: The spec is not valid, or names no codec or another axis.
    """
    from ddltrace.experiments.strategy.catalogue import technique
    from ddltrace.experiments.strategy.spec import parse

    strategy = parse(spec)
    for part in strategy.spec.split("+"):
        name = part.partition(":")[0]
        entry = technique(name)
        if entry is None or entry.axis != "volume":
            raise UsageError(f"codec {spec!r:.80}: {name} is no codec")
    try:
        codec = compose(strategy.codec, strategy.feedback)
    except ValueError as error:
        raise UsageError(f"codec {spec!r:.80}: {error}") from error
    if codec is None:
        raise UsageError(f"codec {spec!r:.80}: the spec names no codec")
    return codec
