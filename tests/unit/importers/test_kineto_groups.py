"""Process groups of Kineto files that do not name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.importers import formats

_NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write_job(folder: Path, *, world_size: int, fields: dict[str, Any], config: bool) -> Path:
    """One all-reduce a rank; the configured groups are all ranks and pairs of neighbors."""
    folder.mkdir()
    for rank in range(world_size):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        head: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        if config:
            everyone = list(range(world_size))
            head["pg_config"] = [
                {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": everyone},
                {"pg_name": f"tp{rank // 2}", "pg_desc": "tp", "pg_size": 2, "ranks": pair},
            ]
        args = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, **fields}
        event = {"ph": "X", "cat": "kernel", "name": _NCCL, "pid": 0, "tid": 20, "dur": 100}
        events = [{**event, "ts": 1000 + 50 * rank, "args": {"stream": 20, **args}}]
        file = {"schemaVersion": 1, "distributedInfo": head, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(file))
    return folder


@pytest.mark.parametrize(
    ("size", "config", "names", "ranks"),
    [
        (2, True, ["tp0", "tp0", "tp1", "tp1"], [(0, 1), (0, 1), (2, 3), (2, 3)]),
        (2, False, [f"unnamed of 2 (rank {rank})" for rank in range(4)], [()] * 4),
        (4, True, ["0"] * 4, [(0, 1, 2, 3)] * 4),
        (4, False, ["default"] * 4, [(0, 1, 2, 3)] * 4),
        (3, True, [f"unnamed of 3 (rank {rank})" for rank in range(4)], [()] * 4),
        (None, False, ["default"] * 4, [(0, 1, 2, 3)] * 4),
    ],
)
def test_group_of_a_size_without_a_name(
    tmp_path: Path,
    size: int | None,
    config: bool,
    names: list[str],
    ranks: list[tuple[int, ...]],
) -> None:
    fields = {} if size is None else {"Group size": size}
    trace = formats.read(write_job(tmp_path / "job", world_size=4, fields=fields, config=config))
    used = [table["group"].to_pylist()[0] for table in trace.tables.values()]
    assert used == names
    by_name = [{g.name: g for g in info.groups} for info in trace.run.ranks]
    assert [groups[name].ranks for groups, name in zip(by_name, used, strict=True)] == ranks
    unknown = [note for note in trace.run.notes if "neither a name nor members" in note]
    assert len(unknown) == (() in ranks)
    if () in ranks:
        assert {groups[name].size for groups, name in zip(by_name, used, strict=True)} == {size}


def test_members_name_a_group(tmp_path: Path) -> None:
    fields = {"Group size": 2, "Process Group Ranks": "[0, 2]"}
    trace = formats.read(write_job(tmp_path / "job", world_size=1, fields=fields, config=False))
    assert [(g.name, g.ranks) for g in trace.run.ranks[0].groups] == [("ranks 0, 2", (0, 2))]
