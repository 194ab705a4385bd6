"""The trace's schema: one Arrow row per event, the same for every source of a trace.

The meaning of every column stands in ``docs/trace-format.md``. Two rules hold throughout:
times are nanoseconds of ``CLOCK_MONOTONIC`` in the process that wrote them, and what was
not seen is null, never zero.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1
"""Raised when a reader of the former version would misread the new one."""

SCHEMA_NAME: Final = f"ddltrace.trace/{SCHEMA_VERSION}"

KINDS: Final = (
    "step",  # one optimizer step: from the end of the former step to the end of this one
    "phase",  # forward, backward or optimizer as a whole
    "layer",  # the forward call of one module
    "gradient",  # an instant: the gradient of one parameter is ready
    "message",  # one collective, send or receive on this rank
    "wait",  # the host is blocked until a message completes
    "codec",  # encoding or decoding of a message
    "kernel",  # device work that is not communication
    "copy",  # a memory copy or fill on a device
    "data",  # fetching one batch from a data loader
    "marker",  # an annotation by the user
    "host",  # host-side work known from an imported trace (an operator, a runtime call)
)
PHASES: Final = ("data", "forward", "backward", "optimizer", "other")
OPS: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
"""Public names in ``torch.distributed``; an operation outside this list keeps its own name."""

P2P_OPS: Final = frozenset({"send", "recv"})
STATUSES: Final = ("ok", "open", "failed")
"""State of a message: completed, not completed when last seen, ended in an error."""


def _coded(index: pa.DataType) -> pa.DictionaryType:
    return pa.dictionary(index, pa.string())


EVENTS: Final = pa.schema(
    [
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64()),
        pa.field("kind", _coded(pa.int8()), nullable=False),
        pa.field("name", _coded(pa.int32())),
        pa.field("lane", _coded(pa.int16())),
        pa.field("step", pa.int32()),
        pa.field("phase", _coded(pa.int8())),
        pa.field("id", pa.int64()),
        pa.field("parent", pa.int64()),
        pa.field("op", _coded(pa.int8())),
        pa.field("group", _coded(pa.int16())),
        pa.field("seq", pa.int64()),
        pa.field("peer", pa.int32()),
        pa.field("tag", pa.int32()),
        pa.field("bytes", pa.int64()),
        pa.field("out_bytes", pa.int64()),
        pa.field("wire_bytes", pa.int64()),
        pa.field("dtype", _coded(pa.int8())),
        pa.field("enqueue_ns", pa.int64()),
        pa.field("status", _coded(pa.int8())),
        pa.field("tensors", pa.list_(pa.int32())),
    ],
    metadata={b"ddltrace.schema": SCHEMA_NAME.encode()},
)
"""The columns of an event file, in order."""
