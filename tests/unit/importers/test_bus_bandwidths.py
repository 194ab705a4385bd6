"""Algorithm and bus bandwidth of each operation in each format, by nccl-tests' formulas.

After https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: the algorithm bandwidth
is S / t, where S is the size of the operation (of all ranks' parts together where each rank has a
part), and the bus bandwidth is that times a factor.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chakra_files import chakra_file, chakra_node

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.chakra.messages import COLLECTIVE, COLLECTIVES
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.open_trace import open_trace

RANKS = 4
PART = 65_536
"""Elements of 4 bytes of one rank's part, or of the whole where all ranks have it."""

US = 400
BEGIN = 1_700_000_000_000_000_000

TABLE = [
    # Operation, parts that a rank puts in and takes out, S in parts, factor.
    ("all_reduce", 1, 1, 1, 2 * 3 / 4),
    ("broadcast", 1, 1, 1, 1.0),
    ("reduce", 1, 1, 1, 1.0),
    ("all_gather", 1, 4, 4, 3 / 4),
    ("reduce_scatter", 4, 1, 4, 3 / 4),
    ("all_to_all", 4, 4, 4, 3 / 4),
    ("gather", 1, 4, 4, 3 / 4),
    ("scatter", 4, 1, 4, 3 / 4),
]


def kineto(path: Path, op: str, given: int, taken: int) -> None:
    named = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}
    kernel = {
        "all_reduce": "AllReduce_Sum_f32_RING_LL",
        "broadcast": "Broadcast_RING_LL",
        "reduce": "Reduce_Sum_f32_RING_LL",
        "all_gather": "AllGather_RING_LL",
        "reduce_scatter": "ReduceScatter_Sum_f32_RING_LL",
    }.get(op, "SendRecv")
    for rank in range(RANKS):
        args = {
            "stream": 20,
            "Collective name": named.get(op, op.replace("all_reduce", "allreduce")),
            "dtype": "Float",
            "In msg nelems": given * PART,
            "Out msg nelems": taken * PART,
            "Group size": RANKS,
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(RANKS))),
        }
        event = {"ph": "X", "cat": "kernel", "name": f"ncclDevKernel_{kernel}", "pid": 0, "tid": 20}
        event |= {"ts": 1000, "dur": US, "args": args}
        head = {"backend": "nccl", "rank": rank, "world_size": RANKS}
        content = {"schemaVersion": 1, "distributedInfo": head, "traceEvents": [event]}
        (path / f"rank{rank}.json").write_text(json.dumps(content))


def flight_recorder(path: Path, op: str, given: int, taken: int) -> None:
    named = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
    entry = {
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "record_id": 0,
        "profiling_name": f"nccl:{named.get(op, op)}",
        "time_created_ns": BEGIN,
        "input_sizes": [[given * PART]],
        "input_dtypes": ["Float"],
        "output_sizes": [[taken * PART]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": BEGIN,
        "time_discovered_completed_ns": BEGIN + US * 1000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}}
    for rank in range(RANKS):
        dump = {"version": "2.10", "pg_config": config, "entries": [entry]}
        (path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))


def chakra(path: Path, op: str, given: int, taken: int) -> None:
    number = next(code for code, name in COLLECTIVES.items() if name == op)
    values = {"comm_type": number, "comm_size": 4 * given * PART, "out_bytes": 4 * taken * PART}
    for rank in range(RANKS):
        node = chakra_node(
            1, op, COLLECTIVE, start=1000, duration=US, attributes=values | {"pg_name": "0"}
        )
        (path / f"job.{rank}.et").write_bytes(chakra_file([node]))


WRITERS: dict[str, Callable[[Path, str, int, int], None]] = {
    "kineto": kineto,
    "flight recorder": flight_recorder,
    "chakra": chakra,
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_bandwidths_are_those_of_nccl_tests(
    tmp_path: Path, form: str, row: tuple[str, int, int, int, float]
) -> None:
    op, given, taken, size, factor = row
    files = tmp_path / "files"
    files.mkdir()
    WRITERS[form](files, op, given, taken)
    save(formats.read(files), tmp_path / "trace", force=False)
    [found] = analyze(open_trace(tmp_path / "trace")).collectives
    algorithm = size * PART * 4 * 8 / (US * 1e3)
    assert found.op == op
    # Clocks that are fitted by messages move ends by some tenths of a microsecond.
    assert found.algbw_gbps == pytest.approx(algorithm, rel=1e-3)
    assert found.busbw_gbps == pytest.approx(algorithm * factor, rel=1e-3)
