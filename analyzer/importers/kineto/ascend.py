"""Ascend's ``trace_view.json`` of torch_npu: Kineto's form, without categories on devices.

What an event is follows from the name of its process: ``Ascend Hardware`` has the kernels and
copies, ``Communication`` (``HCCL`` in older versions) the collectives, ``hcom_*``, and beside them
their parts. ``Overlap Analysis`` sums up the others. (Ascend/msprof-analyze documents these.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ddltrace.analyzer.importers.chrome.trace_events import UNDECODABLE, Args, Complete

HARDWARE: Final = "Ascend Hardware"
_COMMUNICATION: Final = ("Communication", "HCCL")
_SUMMARY: Final = "Overlap Analysis"
_COPY: Final = re.compile(r"memcpy|memset", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"__[\d_]+$")
"""Group, place in the group and attempt of a collective, behind its name."""

_TYPES: Final = {"fp32": "float", "fp16": "half", "bfp16": "bfloat16", "fp64": "double"}


class _Sizes(msgspec.Struct, gc=False):
    count: Any = None
    data_type: Any = None


_SIZES: Final = msgspec.json.Decoder(_Sizes)


def categorized(events: Iterable[Complete], processes: dict[Any, str]) -> list[Complete]:
    """The events with Kineto's categories; parts and sums of others are left out.

    Args:
        events: Intervals, which are changed.
        processes: Id -> name of the processes in the file.
    """
    found = []
    for event in events:
        process = processes.get(event.pid)
        if process == HARDWARE:
            event.cat = "gpu_memcpy" if _COPY.match(event.name) else "kernel"
        elif process in _COMMUNICATION:
            if not event.name.startswith("hcom_"):
                continue
            event.cat, event.name = "kernel", _NUMBERS.sub("_", event.name)
        elif process == _SUMMARY:
            continue
        found.append(event)
    return found


def with_sizes(args: Args, raw: msgspec.Raw) -> Args:
    """Adds elements and type of a collective as Ascend names them."""
    try:
        sizes = _SIZES.decode(raw) if raw else _Sizes()
    except UNDECODABLE:
        return args
    if args.in_elements is None and isinstance(sizes.data_type, str):
        kind = sizes.data_type.lower()
        return msgspec.structs.replace(args, in_elements=sizes.count, dtype=_TYPES.get(kind, kind))
    return args
