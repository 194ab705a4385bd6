"""Writes a long trace: equal steps of two ranks, whose files have several batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import segment_name

STEP_NS = 1_000_000
LAYERS = 24


def write_long_trace(
    directory: Path, steps: int, ranks: Sequence[int] = (0, 1), world_size: int = 2
) -> int:
    """Writes the trace into a new directory.

    Returns:
        Number of events of each rank.
    """
    directory.mkdir(parents=True)
    run = RunInfo(status="complete", created_unix_ns=1)
    rng = np.random.default_rng(0)
    # Times that compress as little as measured ones do.
    jitter = rng.integers(0, 5_000, (steps, LAYERS + 4))
    rows = 0
    for rank in ranks:
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=100 + rank),
            world_size=world_size,
            status="complete",
            host=f"host{rank}",
            clock_domain="one",
            tensors=[TensorInfo(0, "weight", (4,), "float32", 4096)],
            groups=[GroupInfo("0", "", "gloo", tuple(range(world_size)))],
        )
        table = _events(steps, jitter + rng.integers(0, 2_000, jitter.shape))
        info.events, info.checksum = write_events(directory, info.segment, _batches(table))
        rows = info.events
        run.ranks.append(info)
    write_run(directory, run)
    return rows


def _batches(table: pa.Table) -> Any:
    return iter(table.combine_chunks().to_batches(max_chunksize=4096))


def _events(steps: int, jitter: Any) -> pa.Table:
    """Each step: layers of a forward pass, a gradient, an all-reduce, the optimizer, the step."""
    count = LAYERS + 4
    number = np.repeat(np.arange(steps), count)
    row = np.tile(np.arange(count), steps)
    part = STEP_NS // (count + 2)
    start = number * STEP_NS + row * part + jitter.reshape(-1)
    end = start + part // 2
    of_step, of_message = row == count - 1, row == LAYERS + 1
    last = (number + 1) * STEP_NS
    first = number * STEP_NS
    start, end = np.where(of_step, first, start), np.where(of_step, last, end)
    kinds = ["layer", "gradient", "message", "phase", "step"]
    kind = np.select(
        [row < LAYERS, row == LAYERS, of_message, row == LAYERS + 2], [0, 1, 2, 3], default=4
    )

    def coded(name: str, codes: Any, words: list[str], mask: Any = None) -> pa.Array:
        index = EVENTS.field(name).type.index_type
        return pa.DictionaryArray.from_arrays(pa.array(codes, index, mask=mask), pa.array(words))

    def only_message(name: str, values: Any) -> pa.Array:
        return pa.array(values, EVENTS.field(name).type, mask=~of_message)

    zeros = np.zeros(len(row), np.int64)
    names = [f"layer{n}" for n in range(LAYERS)] + ["weight", "all_reduce", "optimizer", "step"]
    columns = {
        "start_ns": pa.array(start),
        "end_ns": pa.array(end),
        "kind": coded("kind", kind, kinds),
        "name": coded("name", row, names),
        "lane": coded("lane", zeros, ["main"]),
        "step": pa.array(number, pa.int32()),
        "phase": coded("phase", np.where(row < LAYERS, 0, 1), ["forward", "optimizer"]),
        "id": only_message("id", number),
        "op": coded("op", zeros, ["all_reduce"], ~of_message),
        "group": coded("group", zeros, ["0"], ~of_message),
        "seq": only_message("seq", number),
        "bytes": only_message("bytes", zeros + 4096),
        "enqueue_ns": only_message("enqueue_ns", start - 100),
        "status": coded("status", zeros, ["ok"], ~of_message),
    }
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(len(row), field.type)
        for field in EVENTS
    ]
    return pa.table(arrays, schema=EVENTS)
