"""The direction of a device copy, from the name that the profiler gives it.

CUPTI and PyTorch's profiler write ``Memcpy HtoD (Pinned -> Device)``, ``Memcpy PtoP`` (peer to
peer) and ``Memset``; the ROCm profiler writes ``CopyHostToDevice``, the one for XPUs ``H2D`` and
``M2D`` (M for the host's memory).
"""

from __future__ import annotations

import re
from typing import Final

DIRECTIONS: Final = (
    "host_to_device",
    "device_to_host",
    "device_to_device",
    "peer",
    "fill",
    "other",
)
"""``peer`` is between devices, ``fill`` a memset, ``other`` a name without a direction."""

BANDWIDTHS_LABEL: Final = "copy_bandwidths"
"""The entry of a run's labels with what a profiler states as the bandwidth of copies, GB/s.

Rank, as text -> one number for each copy, in the order of its events; 0 for none. A rank whose
copies have the bandwidth that bytes and duration give is left out.
"""

_KINETO_LETTERS: Final = len("Memcpy HtoD")
_PATTERNS: Final = tuple(
    (direction, re.compile(pattern, re.IGNORECASE))
    for direction, pattern in (
        ("fill", r"memset|fillbuffer"),
        ("peer", r"\bPtoP\b|\bP2P\b|peer"),
        ("host_to_device", r"HtoD|\bH2D\b|\bM2D\b|HostToDevice|(pageable|pinned|host) -> device"),
        ("device_to_host", r"DtoH|\bD2H\b|\bD2M\b|DeviceToHost|device -> (pageable|pinned|host)"),
        ("device_to_device", r"DtoD|\bD2D\b|DeviceToDevice|device -> device"),
    )
)


def copy_direction(name: str) -> str:
    """Returns one of `DIRECTIONS`; ``other`` if the name does not contain a direction."""
    for direction, pattern in _PATTERNS:
        if pattern.search(name):
            return direction
    return "other"


def kineto_direction(name: str, other: str) -> str:
    """The beginning of CUPTI's name that tells the direction, or ``Memset``; else `other`."""
    if name.startswith("Memset"):
        return "Memset"
    return name[:_KINETO_LETTERS] if name.startswith("Memcpy") else other
