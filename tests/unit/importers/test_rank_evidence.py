"""Which rank a file is of: by what it states, or by its name; other numbers are no ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.rank_files import assign_ranks
from ddltrace.tracer.errors import TraceError


def kineto(path: Path, rank: int | None = None, start: int = 0, pid: str | int = 0) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": pid, "tid": 7, "dur": 50}
    events = [kernel | {"ts": start + 100 * n, "args": {"stream": 7}} for n in range(4)]
    meta = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    path.parent.mkdir(exist_ok=True)
    content = {"schemaVersion": 1, "deviceProperties": [], **meta, "traceEvents": events}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank-0.json", "rank-10.json"], [0, 10]),
        (["worker0.1623143089861.pt.trace.json", "worker0.1623143566756.pt.trace.json"], [0, 0]),
        (["1760000000-TP-0.trace.json.gz", "1760000000-TP-1.trace.json.gz"], [0, 1]),
        (["1-TP-0-DP-0.trace.json", "1-TP-0-DP-1.trace.json"], [0, 1]),
        (
            ["h_4711.1623143089861.trace.json", "h_4712.1623143089862.trace.json"],
            [0, 1],
        ),
        (["bert-small__1016001.json"], [0]),
        (["trace_1.json", "trace_0.json"], [1, 0]),
        (["trace_4.json", "trace_7.json"], [0, 1]),
        (["rank0/trace.json", "rank1/trace.json"], [0, 1]),
        (["rank0/worker0.1.json", "rank1/worker0.2.json"], [0, 1]),
        (["llama_tp8_a.json", "llama_tp8_b.json"], [0, 1]),
        (["frank12.json"], [0]),
    ],
)
def test_only_what_names_a_rank_is_one(names: list[str], ranks: list[int]) -> None:
    paths = [Path("job", name) for name in names]
    assert assign_ranks([None] * len(names), paths, [], several=True) == ranks


def test_what_files_state_comes_first() -> None:
    paths = [Path("rank-5.json"), Path("rank-6.json")]
    assert assign_ranks([1, 0], paths, []) == [1, 0]


def test_folders_of_ranks_are_read_as_one_job(tmp_path: Path) -> None:
    for rank in range(2):
        kineto(tmp_path / f"rank{rank}" / "trace.json")
    run = formats.read(tmp_path).run
    assert [info.rank for info in run.ranks] == [0, 1]
    assert any("names of the files" in note for note in run.notes)


def test_two_windows_of_one_worker_are_one_rank(tmp_path: Path) -> None:
    for start in (0, 100_000):
        kineto(tmp_path / f"worker0.{start + 1623143089861}.pt.trace.json", start=start)
    run = formats.read(tmp_path).run
    assert {info.rank for info in run.ranks} == {0}


def test_a_file_of_merged_ranks_is_refused(tmp_path: Path) -> None:
    kineto(tmp_path / "a.json", pid="[TP00] 0")
    content = json.loads((tmp_path / "a.json").read_text())
    other = [event | {"pid": "[TP01] 1"} for event in content["traceEvents"]]
    content["traceEvents"] += other
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(TraceError, match="several ranks are merged into one file"):
        formats.read(tmp_path / "a.json")
