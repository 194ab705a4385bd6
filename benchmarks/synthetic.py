"""Traces of any size with a known answer: a straggler, and a critical path worked out by hand.

Every step of every rank is data-parallel training: fetch a batch, run the layers forward, make
the gradients in backward, send them in buckets, wait for the last bucket, update. One rank, the
straggler, takes longer in forward. All times are whole nanoseconds and follow from `Shape`, so
`expected_path` states the critical path of every step exactly; only where the layers of a rank
meet inside of forward is drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.schema import EVENTS, KINDS, OPS, PHASES, STATUSES
from ddltrace.tracer.trace.trace_files import segment_name

GROUP = "0"
_BASE_NS = 10**12
_LANES = ["main", "comm/0"]
_PLAIN_NAMES = ["step", "forward", "backward", "optimizer", "next batch"]


@dataclass(frozen=True)
class Shape:
    """What a synthetic job looks like; times in nanoseconds.

    Attributes:
        ranks: Rank processes.
        steps: Optimizer steps.
        layers: Layers, each with one parameter.
        buckets: Messages a step; they divide the layers.
        straggler: The rank that is late.
        late: How much longer its forward takes.
        data: Fetching a batch.
        layer: Forward of one layer.
        gradient: Backward of one layer.
        transfer: Transfer of one bucket.
        update: The optimizer step.
        tensor_bytes: Size of one parameter.
    """

    ranks: int = 2
    steps: int = 10
    layers: int = 480
    buckets: int = 20
    straggler: int = 1
    late: int = 3_000_000
    data: int = 500_000
    layer: int = 20_000
    gradient: int = 40_000
    transfer: int = 400_000
    update: int = 900_000
    tensor_bytes: int = 65_536

    @property
    def forward(self) -> int:
        """Forward of a rank that is not late."""
        return self.layers * self.layer

    @property
    def step(self) -> int:
        """Wall time of a step: what the straggler needs, the last transfer, the update."""
        return (
            self.data + self.forward + self.late + self.layers * self.gradient
            + self.transfer + self.update
        )  # fmt: skip

    @property
    def events(self) -> int:
        """Events of one rank in one step."""
        return 2 * self.layers + self.buckets + 6


def expected_path(shape: Shape) -> dict[str, int]:
    """The critical path of every step by category, nanoseconds."""
    return {
        "compute": shape.forward + shape.late + shape.layers * shape.gradient,
        "transfer": shape.transfer,
        "wait": 0,
        "update": shape.update,
        "data": shape.data,
        "copy": 0,
        "host": 0,
        "idle": 0,
    }


def write_trace(path: Path, shape: Shape) -> Path:
    """Writes a finished trace of the given shape."""
    if shape.layers % shape.buckets or shape.transfer > shape.gradient * (
        shape.layers // shape.buckets
    ):
        raise ValueError("buckets must divide the layers, and no bucket may queue behind another")
    path.mkdir(parents=True)
    names = [f"block{i // 8}.{i % 8}.weight" for i in range(shape.layers)]
    size = shape.tensor_bytes
    tensors = [TensorInfo(i, name, (size // 4,), "float32", size) for i, name in enumerate(names)]
    groups = [GroupInfo(GROUP, "default_pg", "gloo", tuple(range(shape.ranks)))]
    infos = []
    for rank in range(shape.ranks):
        info = RankInfo(
            rank,
            segment_name(rank=rank, attempt=0, pid=1000 + rank),
            world_size=shape.ranks,
            host=f"host{rank // 8}",
            clock_domain="one clock",
            status="complete",
            backend="gloo",
            tensors=tensors,
            groups=groups,
        )
        batches = _batches(shape, rank, names)
        info.events, info.checksum = write_events(path, info.segment, batches)
        infos.append(info)
    run = RunInfo(status="complete", command=["synthetic"], ranks=infos)
    write_run(path, run)
    return path


def _batches(shape: Shape, rank: int, names: list[str]):  # noqa: ANN202
    """A rank's events, a few steps at a time, so that any number of steps fits in memory."""
    steps_at_once = max(1, (1 << 16) // shape.events)
    template = _one_step(shape, rank)
    dictionaries = _dictionaries(names)
    for first in range(0, shape.steps, steps_at_once):
        steps = np.arange(first, min(first + steps_at_once, shape.steps))
        yield _batch(shape, template, dictionaries, steps)


def _one_step(shape: Shape, rank: int) -> dict[str, np.ndarray]:
    """Columns of one step's events from its start, in the order in which they end."""
    random = np.random.default_rng(rank)
    late = shape.late if rank == shape.straggler else 0
    layers, buckets = shape.layers, shape.buckets
    forward_start = shape.data
    forward_end = forward_start + shape.forward + late
    meets = np.sort(random.integers(forward_start + 1, forward_end, layers - 1))
    layer_start = np.concatenate([[forward_start], meets])
    layer_end = np.concatenate([meets, [forward_end]])
    gradients = forward_end + shape.gradient * np.arange(1, layers + 1)
    arrival = gradients[layers // buckets - 1 :: layers // buckets]
    last_arrival = arrival - late + shape.late
    complete = last_arrival + shape.transfer
    waited = int(complete[-1])
    end = waited + shape.update

    def rows(kind: str, start, stop, **columns) -> dict[str, np.ndarray]:  # noqa: ANN001, ANN003
        count = len(np.atleast_1d(start))
        full = {"kind": KINDS.index(kind), "name": -1, "lane": 0, "id": -1, "tensor": -1}
        full |= columns
        return {
            "start": np.atleast_1d(start),
            "end": np.atleast_1d(stop),
            **{name: np.broadcast_to(value, count) for name, value in full.items()},
        }

    plain = {name: i for i, name in enumerate(_PLAIN_NAMES)}
    tensor = np.arange(layers)[::-1]
    parts = [
        rows("data", 0, shape.data, name=plain["next batch"]),
        rows("layer", layer_start, layer_end, name=len(plain) + np.arange(layers)),
        rows("phase", forward_start, forward_end, name=plain["forward"]),
        rows("gradient", gradients, gradients, name=len(plain) + tensor, tensor=tensor),
        rows("message", arrival, complete, lane=1, id=np.arange(buckets)),
        rows("wait", gradients[-1], waited, name=plain["backward"]),
        rows("phase", forward_end, waited, name=plain["backward"]),
        rows("phase", waited, end, name=plain["optimizer"]),
        rows("step", 0, end, name=plain["step"]),
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["end"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _dictionaries(names: list[str]) -> dict[str, pa.Array]:
    return {
        "kind": pa.array(KINDS),
        "name": pa.array([*_PLAIN_NAMES, *names]),
        "lane": pa.array(_LANES),
        "phase": pa.array(PHASES),
        "op": pa.array(OPS),
        "group": pa.array([GROUP]),
        "dtype": pa.array(["float32"]),
        "status": pa.array(STATUSES),
    }


def _batch(
    shape: Shape,
    template: dict[str, np.ndarray],
    dictionaries: dict[str, pa.Array],
    steps: np.ndarray,
) -> pa.RecordBatch:
    count = len(steps)
    column = {name: np.tile(values, count) for name, values in template.items()}
    step = np.repeat(steps, len(template["start"]))
    begin = _BASE_NS + step * shape.step
    message = column["kind"] == KINDS.index("message")
    number = step * shape.buckets + column["id"]
    per_bucket = shape.layers // shape.buckets
    size = per_bucket * shape.tensor_bytes
    counts = np.where(message, per_bucket, np.where(column["tensor"] >= 0, 1, 0))
    lists = np.cumsum(counts) - counts
    flat = np.empty(int(counts.sum()), dtype=np.int32)
    gradients = column["tensor"] >= 0
    flat[lists[gradients]] = column["tensor"][gradients]
    bucket = column["id"][message]
    flat[lists[message][:, None] + np.arange(per_bucket)] = (
        shape.layers - 1 - (bucket[:, None] * per_bucket + np.arange(per_bucket))
    )
    values = {
        "start_ns": (begin + column["start"], None),
        "end_ns": (begin + column["end"], None),
        "kind": (column["kind"], None),
        "name": (column["name"], column["name"] < 0),
        "lane": (column["lane"], None),
        "step": (step, None),
        "id": (number, ~message),
        "op": (np.zeros(len(step)), ~message),
        "group": (np.zeros(len(step)), ~message),
        "seq": (number, ~message),
        "bytes": (np.full(len(step), size), ~message),
        "out_bytes": (np.full(len(step), size), ~message),
        "dtype": (np.zeros(len(step)), ~message),
        "enqueue_ns": (begin + column["start"], ~message),
        "status": (np.zeros(len(step)), ~message),
    }
    arrays = []
    for field in EVENTS:
        if field.name == "tensors":
            offsets = pa.array(
                np.append(lists, len(flat)).astype(np.int32), mask=np.append(counts == 0, False)
            )
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(flat)).cast(field.type))
        elif field.name not in values:
            arrays.append(
                pa.nulls(len(step), field.type)
                if not pa.types.is_dictionary(field.type)
                else _coded(np.zeros(len(step)), np.ones(len(step), bool), field, dictionaries)
            )
        else:
            data, mask = values[field.name]
            if pa.types.is_dictionary(field.type):
                arrays.append(_coded(data, mask, field, dictionaries))
            else:
                arrays.append(pa.array(data, field.type, mask=mask))
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def _coded(data, mask, field, dictionaries):  # noqa: ANN001, ANN202
    indices = pa.array(data.astype(field.type.index_type.to_pandas_dtype()), mask=mask)
    return pa.DictionaryArray.from_arrays(indices, dictionaries.get(field.name, pa.array([""])))
