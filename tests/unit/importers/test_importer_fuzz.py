"""Thousands of damaged files: each gives a trace or one line of error, never anything else."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chakra_files import chakra_file, chakra_node

from ddltrace.analyzer.importers import formats
from ddltrace.tracer.errors import TraceError

MUTATIONS = 500

_JUNK = [
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b'"\\ud800"',
    b"[[[[]]]]",
    b'{"ph":"X"}',
    b'"',
    b"}",
    b"]",
    b"\x00",
    b"\xff\xfe",
    b"\x1b[31m",
    b"NaN",
    b"true",
    b"0.0000001",
]


def mutate(content: bytes, choice: random.Random) -> bytes:
    """Flips, cuts, repeats or replaces a few pieces."""
    data = bytearray(content)
    for _ in range(choice.randint(1, 6)):
        if not data:
            break
        place = choice.randrange(len(data))
        kind = choice.randrange(6)
        if kind == 0:
            data[place] ^= 1 << choice.randrange(8)
        elif kind == 1:
            del data[place : place + choice.randint(1, 40)]
        elif kind == 2:
            data[place:place] = choice.choice(_JUNK)
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place:place] = data[place : place + choice.randint(1, 200)]
        else:
            # A value of another type: behind the next colon.
            colon = data.find(b":", place)
            if colon >= 0:
                end = min(
                    (at for at in (data.find(b",", colon), data.find(b"}", colon)) if at > 0),
                    default=colon + 1,
                )
                data[colon + 1 : end] = choice.choice(_JUNK)
    return bytes(data)


def small_kineto(foreign: Path) -> bytes:
    """A slice of the real file, with every kind of event that it has."""
    value = json.loads(gzip.decompress((foreign / "kineto-cpu" / "rank-0.json.gz").read_bytes()))
    events = value["traceEvents"]
    value["traceEvents"] = events[:20] + [
        event for event in events if event["name"].startswith(("gloo", "c10d", "Profiler"))
    ]
    return json.dumps(value).encode()


def gpu_kineto(foreign: Path) -> bytes:
    args = {
        "stream": 7,
        "correlation": 5,
        "bytes": 9,
        "Collective name": "allreduce",
        "In msg nelems": 3,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
        "Seq": 3,
        "Input Dims": [[1, 2]],
        "Input type": ["float"],
    }
    events = [
        {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": 3, "pid": 1, "tid": 7}
        | {"args": args}
        for ts, (category, name) in enumerate(
            [
                ("cuda_runtime", "cudaLaunchKernel"),
                ("kernel", "ncclDevKernel_AllReduce"),
                ("gpu_memcpy", "Memcpy HtoD"),
                ("cuda_sync", "Stream Sync"),
                ("user_annotation", "ProfilerStep#3"),
                ("user_annotation", "Optimizer.step#SGD.step"),
                ("cpu_op", "autograd::engine::evaluate_function: X"),
                ("cpu_op", "record_param_comms"),
            ]
        )
    ]
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}).encode()


def horovod(foreign: Path) -> bytes:
    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w"}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1},
        {"ph": "X", "name": "0", "ts": 1, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 2, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 3, "pid": 1},
        {"ph": "E", "ts": 9, "pid": 1, "args": {"dtype": "float32", "shape": "[1, 2]"}},
    ]
    return json.dumps(events).encode()


def inspector(foreign: Path) -> bytes:
    value = {
        "header": {"id": "0x1", "rank": 0, "n_ranks": 2},
        "metadata": {"dump_timestamp_us": 1000, "hostname": "a", "pid": 1},
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": 1,
            "coll_msg_size_bytes": 5,
            "coll_exec_time_us": 5,
        },
    }
    return b"\n".join([json.dumps(value).encode()] * 3)


def recorder(foreign: Path) -> bytes:
    return (foreign / "flight-recorder" / "nccl_trace_rank_0").read_bytes()


def chakra(foreign: Path) -> bytes:
    """Nodes of each type, encoded as the format's schema says."""
    return chakra_file(
        chakra_node(
            number, f"node {number}", kind, start=10 + number, duration=5, deps=[number - 1]
        )
        for number, kind in enumerate([4, 7, 5, 6, 2, 3, 1] * 3, 1)
    )


def chakra_json(foreign: Path) -> bytes:
    nodes = [
        {"id": str(number), "name": "n", "type": kind, "startTimeMicros": str(10 + number)}
        | {"durationMicros": "5", "dataDeps": ["1"]}
        | {"attr": [{"name": "comm_size", "int64Val": "64"}, {"name": "x", "boolVal": True}]}
        for number, kind in enumerate(["COMP_NODE", "COMM_COLL_NODE", "COMM_RECV_NODE"] * 3, 1)
    ]
    return b"".join(json.dumps(each).encode() for each in [{"version": "1.0.0"}, *nodes])


# Nearly every damage to a pickle makes all of it unreadable.
@pytest.mark.parametrize(
    ("make", "least"),
    [
        (small_kineto, 0.3),
        (gpu_kineto, 0.3),
        (horovod, 0.3),
        (inspector, 0.3),
        (recorder, 0.01),
        (chakra, 0.3),
        (chakra_json, 0.3),
    ],
)
def test_damage_is_survived(
    foreign: Path, tmp_path: Path, make: Callable[[Path], bytes], least: float
) -> None:
    content = make(foreign)
    choice = random.Random(20)
    file = tmp_path / "rank-0.json"
    readable = 0
    messages: list[str] = []
    for number in range(MUTATIONS):
        mutated = mutate(content, choice)
        if number % 7 == 0:
            mutated = mutate(gzip.compress(mutated, 1), choice)
        file.write_bytes(mutated)
        try:
            trace = formats.read(file)
        except TraceError as error:
            messages.append(str(error))
            continue
        readable += 1
        for table in trace.tables.values():
            table.validate(full=True)
        assert all("\n" not in note for note in trace.run.notes)
    # A reader that gave up on everything would pass otherwise.
    assert readable > MUTATIONS * least
    assert all("\n" not in message for message in messages)
