"""The trace's schema: one Arrow row per event, the same for every source of a trace.

``docs/trace-format.md`` describes every column. Two rules apply to all columns: times are
nanoseconds of ``CLOCK_MONOTONIC`` in the process that wrote them, and unobserved values are null,
never zero.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import pyarrow as pa

SCHEMA_VERSION: Final = 1
"""Incremented when a reader of the previous version would misread the new one."""

SCHEMA_FAMILY: Final = "ddltrace.trace/"
SCHEMA_NAME: Final = f"{SCHEMA_FAMILY}{SCHEMA_VERSION}"

LARGE_RUN_SCHEMA_NAME: Final = f"{SCHEMA_FAMILY}2"
"""Schema of ``run.json`` if the members of groups are stored once, which version 1 cannot read."""

KINDS: Final = (
    "step",  # one optimizer step: from the end of the previous step to the end of this one
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
GARBAGE_COLLECTION: Final = "garbage collection"
"""Name of the markers of Python's garbage collections."""
BUCKET: Final = "bucket "
"""Prefix of the names of messages that carry a bucket of DistributedDataParallel."""
CHECKPOINT: Final = "checkpoint "
CHECKPOINT_SAVE: Final = "checkpoint save"
CHECKPOINT_SAVE_ASYNC: Final = "checkpoint save async"
CHECKPOINT_WRITE: Final = "checkpoint write"
CHECKPOINT_LOAD: Final = "checkpoint load"
CHECKPOINT_FILE: Final = " file="
EVALUATION: Final = "evaluation"
"""Names of markers of checkpoints, behind which `CHECKPOINT_FILE` and the number of a file may
stand, and of evaluations."""
STATUSES: Final = ("ok", "open", "failed")
"""State of a message: completed, not completed when last seen, ended in an error."""

CLOCKS: Final = (
    "device",  # events of the device around the message
    "gloo",  # Gloo's threads, when they begin and end it
    "wait",  # the job, when its own wait or question found the message complete
    "thread",  # a thread of the tracer, which waited for it
    "polling",  # a thread of the tracer, which asked for its end every 0.5 to 5 ms
    "host",  # the host, around a call that returned when the message was complete
    "kernel",  # the profiler, from the message's kernel
    "graph",  # none: the message ran in a replay of a CUDA graph
)
"""What a message's times were read from."""

SEAMS: Final = (
    "dispatcher",  # a kernel of its c10d operator, in PyTorch's dispatcher
    "method",  # a method of ProcessGroup, called by Python
    "python group",  # a method of a process group that is written in Python
    "library",  # a function or operator of symmetric memory or of another library
    "rpc",  # a function of torch.distributed.rpc
    "graph",  # the replay of the CUDA graph that it is part of
)
"""Where in PyTorch a message was seen."""


def _coded(index: pa.DataType) -> pa.DictionaryType:
    return pa.dictionary(index, pa.string())


class Column(NamedTuple):
    """One column of an event file.

    Attributes:
        name: Its name, which is also that of the attribute of `Message` with its value.
        type: Its Arrow type.
        message: How messages provide the value: ``own``, each message has its own; ``shared``, all
            repetitions of a message share it; ``time``, the value at the time of the enqueue,
            unless the message has its own; None, messages have no value, or it is derived.
        nullable: Whether it may be null.
    """

    name: str
    type: pa.DataType
    message: Literal["own", "shared", "time"] | None = None
    nullable: bool = True


COLUMNS: Final = (
    Column("start_ns", pa.int64(), "own", nullable=False),
    Column("end_ns", pa.int64(), "own"),
    Column("kind", _coded(pa.int8()), nullable=False),
    Column("name", _coded(pa.int32()), "shared"),
    Column("lane", _coded(pa.int16())),
    Column("step", pa.int32(), "time"),
    Column("phase", _coded(pa.int8()), "time"),
    Column("id", pa.int64(), "own"),
    Column("parent", pa.int64()),
    Column("op", _coded(pa.int8()), "shared"),
    Column("group", _coded(pa.int16()), "shared"),
    Column("seq", pa.int64(), "own"),
    Column("peer", pa.int32(), "own"),
    Column("tag", pa.int32(), "shared"),
    Column("bytes", pa.int64(), "own"),
    Column("out_bytes", pa.int64(), "own"),
    Column("wire_bytes", pa.int64()),
    Column("dtype", _coded(pa.int8()), "shared"),
    Column("enqueue_ns", pa.int64(), "own"),
    Column("status", _coded(pa.int8()), "own"),
    Column("clock", _coded(pa.int8()), "own"),
    Column("seam", _coded(pa.int8()), "shared"),
    Column("buffer", pa.int64(), "own"),
    Column("shapes", _coded(pa.int32())),
    Column("samples", pa.int64()),
    Column("tokens", pa.int64()),
    Column("flops", pa.int64()),
    Column("tensors", pa.list_(pa.int32()), "shared"),
    Column("split_bytes", pa.list_(pa.int64())),
)
"""Every column, in order. The recorder, the batches and the ring of repeated messages derive their
fields of a message from these."""

ADDED: Final = frozenset(
    {"shapes", "clock", "seam", "buffer", "samples", "tokens", "flops", "split_bytes"}
)
"""Columns that older traces of this version lack; readers add them as nulls."""

OWN_FIELDS: Final = tuple(column.name for column in COLUMNS if column.message == "own")
SHARED_FIELDS: Final = tuple(column.name for column in COLUMNS if column.message == "shared")
MESSAGE_FIELDS: Final = tuple(column.name for column in COLUMNS if column.message)

EVENTS: Final = pa.schema(
    [pa.field(column.name, column.type, nullable=column.nullable) for column in COLUMNS],
    metadata={b"ddltrace.schema": SCHEMA_NAME.encode()},
)
"""The columns of an event file, in order."""
