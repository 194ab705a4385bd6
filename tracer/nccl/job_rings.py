"""Starts a job with NCCL's profiler plugin, and shortens its rings when the job has ended."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import MissingCapabilityError, UsageError
from ddltrace.tracer.nccl import library
from ddltrace.tracer.nccl.event_kinds import KINDS
from ddltrace.tracer.next_command import say
from ddltrace.tracer.trace.trace_files import RING_PATTERN

_PLUGIN: Final = "NCCL_PROFILER_PLUGIN"
_KINDS: Final = frozenset({*KINDS, "default"})

# Of the header in `ring.h`: magic, version, size of a record, capacity; offset of the first
# record; number of events.
_HEAD: Final = struct.Struct("<8sIII8xI")
_CAPACITY_AT: Final = 16
_CLAIMED_AT: Final = 160
_CONTROL_AT: Final = 152
MAGIC: Final = b"DDLNCCL\n"
"""How a ring begins, as in `ring.h`."""

_MASK: Final = re.compile(r"0[xX][0-9a-fA-F]{1,8}|0|[1-9][0-9]{0,8}")
_NOT_BY_DEFAULT: Final = frozenset({"proxy_ctrl", "kernel_phase"})
_LEAST_RECORDS: Final = 16


def check_events(events: str) -> str:
    """Checks the kinds of events of ``--nccl``, names divided by commas or a mask.

    Raises:
        UsageError: One of them does not exist.
    """
    if _MASK.fullmatch(events):
        return events
    unknown = sorted(set(events.split(",")) - _KINDS)
    if unknown:
        raise UsageError(
            f"--nccl-events: {unknown[0]!r:.60} is no kind of event: choose from "
            f"{', '.join(sorted(_KINDS))}"
        )
    return events


def plugin_environment(events: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which NCCL loads the plugin; without it, they are empty.

    Args:
        events: The kinds, see `check_events`.
        environment: The variables of the job so far.

    Raises:
        UsageError: The job has a profiler plugin of its own.
    """
    if environment.get(_PLUGIN):
        raise UsageError(
            f"--nccl takes the place of the profiler plugin that {_PLUGIN} names: unset it"
        )
    try:
        plugin = library.find()
    except MissingCapabilityError as error:
        # The job may have waited long for its machines.
        say(f"NCCL's events are not recorded: {error}")
        return {}
    return {_PLUGIN: str(plugin), "DDLTRACE_NCCL_EVENTS": events}


def switch_events(directory: Path, events: str) -> int:
    """Changes the kinds of events that running processes record, from NCCL's next operation on.

    Args:
        directory: The trace, or the folder of the rings.
        events: The kinds, see `check_events`.

    Returns:
        The number of rings.

    Raises:
        UsageError: One of the kinds does not exist, or the folder has no ring.
    """
    check_events(events)
    if _MASK.fullmatch(events):
        mask = int(events, 0)
    else:
        names = set(events.split(","))
        if "default" in names:
            names |= set(KINDS) - _NOT_BY_DEFAULT
        mask = sum(1 << bit for bit, name in enumerate(KINDS) if name in names)
    count = 0
    for path in directory.glob(RING_PATTERN):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "r+b") as file:
            if file.read(len(MAGIC)) == MAGIC:
                file.seek(_CONTROL_AT)
                file.write(struct.pack("<I", mask))
                count += 1
    if not count:
        raise UsageError(f"{directory} has no ring of a job that runs with ddltrace run --nccl")
    return count


def shorten_rings(directory: Path) -> None:
    """Cuts off the unused records of the rings of a job that has ended."""
    for path in directory.glob(RING_PATTERN):
        with contextlib.suppress(OSError, struct.error):
            _shorten(path)


def _shorten(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "r+b") as file:
        head = file.read(_CLAIMED_AT + 8)
        magic, version, record_bytes, capacity, records_at = _HEAD.unpack_from(head)
        (claimed,) = struct.unpack_from("<Q", head, _CLAIMED_AT)
        kept = max(claimed, _LEAST_RECORDS)
        if magic != MAGIC or version != 1 or kept >= capacity:
            return
        # First the number: a reader at this moment sees a file that is longer than necessary.
        file.seek(_CAPACITY_AT)
        file.write(struct.pack("<I", kept))
        file.flush()
        file.truncate(records_at + kept * record_bytes)
