"""Codecs, which encode tensors in fewer bytes for the network.

Each technique is one file with a pure description of its parameters, its wire size and the
exchange that suits it. ``kernels`` contains the torch code that encodes and decodes;
``kernels/make_codec.py`` maps descriptions to it, and is loaded when a codec is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.experiments.codecs.kernels.codec import Codec

__all__ = ["create"]


def create(spec: str, *, seed: int | None = None) -> Codec:
    """Creates a codec from the volume part of a strategy's spec.

    Args:
        spec: For example ``qsgd:s=4`` or ``topk:density=0.01+feedback``.
        seed: Seed of random rounding and selection. By default it differs for every codec of
            the process, except that codecs whose ranks must agree start from 0.

    Returns:
        The codec; `Codec.encode` and `Codec.decode` are its two directions.

    Raises:
        UsageError: The spec is not valid, or names no codec or another axis.
    """
    from ddltrace.experiments.codecs.composition import read
    from ddltrace.experiments.codecs.kernels.make_codec import make_codec

    return make_codec(read(spec), seed=seed)
