"""Which rank a file is of: by what it states, or by its name; other numbers are not ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.rank_files import assign_ranks
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.open_trace import open_as_one, open_trace
from ddltrace.tracer.errors import TraceError, UsageError


def events(start: int = 0, device: str | int = 0, host: str | int = 100) -> list[dict[str, Any]]:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": device, "tid": 7, "dur": 50}
    call = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": host, "tid": 1, "dur": 20}
    return [
        each | {"ts": start + 100 * n, "args": {"stream": 7}}
        for n in range(4)
        for each in (kernel, call)
    ]


def write(path: Path, content: list[dict[str, Any]], rank: int | None = None) -> None:
    meta = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schemaVersion": 1, "deviceProperties": []}
    path.write_text(json.dumps({**head, **meta, "traceEvents": content}))


def kineto(path: Path, rank: int | None = None, start: int = 0) -> None:
    write(path, events(start), rank)


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
        (["rank3.json", "other.json", "rank1.json"], [3, 0, 1]),
        (["tp_rank_1_pp_rank_0.json", "tp_rank_0_pp_rank_1.json"], [0, 1]),
        (["tp0_rank5.json", "tp1_rank4.json"], [5, 4]),
        (["node0/rank0.json", "node1/rank0.json"], [0, 1]),
        (["node1/rank0.json", "node0/rank1.json", "node0/rank0.json"], [2, 1, 0]),
        (["node0/rank0.json", "node1/rank1.json"], [0, 1]),
        (["rank1/out/t.json", "rank0/out/t.json"], [1, 0]),
        (["0/t.json", "2/t.json", "1/t.json"], [0, 2, 1]),
        (["worker0/rank0.json", "worker0/rank1.json"], [0, 1]),
        (
            ["h_7.1623143089861.pt.trace.json", "h_7.1623143566756.pt.trace.json"],
            [0, 0],
        ),
        (
            [
                "h_7.1623143089861.pt.trace.json.gz",
                "h_8.1623143089862.pt.trace.json.gz",
                "h_7.1623143566756.pt.trace.json.gz",
            ],
            [0, 1, 0],
        ),
        (["iteration_10/rank0_trace.json", "iteration_20/rank0_trace.json"], [0, 0]),
    ],
)
def test_only_what_names_a_rank_is_one(names: list[str], ranks: list[int]) -> None:
    paths = [Path("job", name) for name in names]
    assert assign_ranks([None] * len(names), paths, [], several=True) == ranks


def test_what_files_state_comes_first() -> None:
    paths = [Path("rank-5.json"), Path("rank-6.json")]
    notes: list[str] = []
    assert assign_ranks([1, 0], paths, notes) == [1, 0]
    assert not notes


def test_files_that_state_no_rank_take_none_that_is_stated() -> None:
    paths = [Path("a.json"), Path("b.json"), Path("c.json")]
    assert assign_ranks([None, 0, None], paths, []) == [1, 0, 2]


def test_two_files_of_one_rank_are_refused_where_they_are_no_windows() -> None:
    with pytest.raises(TraceError, match=r"a/rank0\.json and b/rank0\.json are both of rank 0"):
        assign_ranks([None, None], [Path("a/rank0.json"), Path("b/rank0.json")], [])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["node0/rank0.json", "node0/rank2.json", "node1/rank0.json"], "ranks of each node from 0"),
        (["0/t.json", "8/t.json"], "called by numbers that do not count them"),
    ],
)
def test_names_that_leave_ranks_unknown_are_refused(names: list[str], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        assign_ranks([None] * len(names), [Path("job", name) for name in names], [], several=True)


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["rank0.json", "rank1.json"], "ranks are taken from the names of the files"),
        (["rank0/t.json", "rank1/t.json"], "ranks are taken from the names of the folders"),
        (["rank0/t.json", "rank1/t.json", "README.md"], "taken from the names of the folders"),
        (["0/a/t.json", "1/a/t.json"], "ranks are taken from the names of the folders"),
        (["node0/rank0.json", "node1/rank0.json"], "counted on from node to node"),
        (["t_0.json", "t_1.json"], "numbers at the ends of the names of the files"),
        (["x.json", "y.json"], "ranks are given in the order of the files' names"),
        (["rank1.json", "y.json"], "1 file has none and takes the free ranks"),
        (["x.json"], "the file states no rank and its name has none: it is read as rank 0"),
        (["rank0.json"], "the rank is taken from the name of the file"),
    ],
)
def test_a_note_names_the_evidence(tmp_path: Path, names: list[str], note: str) -> None:
    for name in names:
        if name == "README.md":
            (tmp_path / name).write_text("# Profiles")
        else:
            kineto(tmp_path / name)
    run = formats.read(tmp_path).run
    assert len(run.ranks) == len([name for name in names if name != "README.md"])
    [found] = [each for each in run.notes if "rank" in each and "state" in each]
    assert note in found
    assert run.status == "complete"


def test_files_given_singly_are_ranks_by_the_same_rule(tmp_path: Path) -> None:
    kineto(tmp_path / "a" / "rank1.json")
    kineto(tmp_path / "b" / "rank0.json")
    kineto(tmp_path / "b" / "rank7.json")
    with open_as_one([tmp_path / "a" / "rank1.json", tmp_path / "b" / "rank0.json"]) as trace:
        assert trace.ranks == [0, 1]
        assert any("names of the files" in note for note in trace.notes)
    with open_as_one([tmp_path / "a", tmp_path / "b"]) as trace:
        assert trace.ranks == [0, 1, 7]
    save(formats.read(tmp_path / "a"), tmp_path / "trace", force=False)
    with (
        pytest.raises(UsageError, match=r"rank1\.json is not a trace of ddltrace run, as others"),
        open_as_one([tmp_path / "trace", tmp_path / "a" / "rank1.json"]),
    ):
        pass


def test_folders_that_name_no_rank_are_named_in_the_refusal(tmp_path: Path) -> None:
    kineto(tmp_path / "before" / "a.json")
    kineto(tmp_path / "after" / "a.json")
    with pytest.raises(TraceError, match="neither the folders' names nor the files' name a rank"):
        open_trace(tmp_path)


def test_the_file_beside_an_ascend_profile_names_its_rank(tmp_path: Path) -> None:
    for rank, name in ((1, "a_1_2_ascend_pt"), (0, "b_1_2_ascend_pt")):
        kineto(tmp_path / name / "ASCEND_PROFILER_OUTPUT" / "trace_view.json")
        (tmp_path / name / f"profiler_info_{rank}.json").write_text("{}")
        (tmp_path / name / "ASCEND_PROFILER_OUTPUT" / "communication.json").write_text("{}")
        kineto(tmp_path / name / "PROF_1" / "mindstudio_rank7.json")
    paths = [tmp_path / name for name in ("a_1_2_ascend_pt", "b_1_2_ascend_pt")]
    trace = formats.read(tmp_path)
    assert [info.rank for info in trace.run.ranks] == [0, 1]
    assert any("names of profiler_info_N.json" in note for note in trace.run.notes)
    assert [formats.read(path).run.ranks[0].rank for path in paths] == [1, 0]


def test_two_windows_of_one_worker_are_one_rank(tmp_path: Path) -> None:
    for start in (0, 100_000):
        kineto(tmp_path / f"h_4711.{start + 1623143089861}.pt.trace.json", start=start)
    run = formats.read(tmp_path).run
    assert {info.rank for info in run.ranks} == {0}
    assert any("2 files are read as windows" in note for note in run.notes)


CHANGED: list[Callable[[int], tuple[str | int, str | int]]] = [
    lambda rank: (f"[TP0{rank}] 0", f"[TP0{rank}] 10{rank}"),  # SGLang's ProfileMerger
    lambda rank: (f"[TP00-EP0{rank}] 0", f"[TP00-EP0{rank}] 100"),
    lambda rank: (f"TP-{rank}", f"TP-{rank}"),
    lambda rank: (f"rank {rank}", f"rank {rank}"),
    lambda rank: (f"rank{rank}_0", f"rank{rank}_100"),
    lambda rank: (f"[Rank {rank}] 0", f"[Rank {rank}] python"),
    lambda rank: (f"0_{rank}", f"100_{rank}"),  # Triton-distributed's group_profile
    lambda rank: (rank * 1000, 100 + rank * 1000),  # TraceLens' TraceFuse
]
"""Rank -> ids of the device and of the host, as scripts that merge files make them."""


@pytest.mark.parametrize(
    "ids", [*CHANGED, lambda rank: (rank + 1, rank + 1), lambda rank: (0, 100 + rank)]
)
def test_a_file_of_merged_ranks_is_refused(
    tmp_path: Path, ids: Callable[[int], tuple[str | int, str | int]]
) -> None:
    content = [each for rank in range(2) for each in events(0, *ids(rank))]
    write(tmp_path / "a.json", content, rank=0)
    with pytest.raises(TraceError, match="several ranks are merged into one file"):
        formats.read(tmp_path / "a.json")


@pytest.mark.parametrize("ids", CHANGED)
def test_a_file_of_kernels_of_merged_ranks_is_refused(
    tmp_path: Path, ids: Callable[[int], tuple[str | int, str | int]]
) -> None:
    content = [each for rank in range(2) for each in events(0, *ids(rank))]
    write(tmp_path / "a.json", [each for each in content if each["cat"] == "kernel"])
    with pytest.raises(TraceError, match="several ranks are merged into one file"):
        formats.read(tmp_path / "a.json")


def test_a_file_whose_processes_are_named_by_ranks_is_refused(tmp_path: Path) -> None:
    content = [*events(device=1, host=1), *events(device=2, host=2)]
    content = [event for event in content if event["cat"] == "kernel"]
    content += [
        {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": f"Rank {rank}"}}
        for rank in range(2)
    ]
    write(tmp_path / "a.json", content)
    with pytest.raises(TraceError, match=r"merged into one file, a\.json \(Rank 0, Rank 1\)"):
        formats.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    "content",
    [
        [*events(device=0), *events(device=1)],
        events(device="[TP03] 0", host="[TP03] 100"),
        [*events(), *events(host=1)[1:2]],
    ],
    ids=["two devices", "one rank of a merge", "one damaged event"],
)
def test_a_file_of_one_process_is_no_merged_one(
    tmp_path: Path, content: list[dict[str, Any]]
) -> None:
    write(tmp_path / "a.json", content)
    assert len(formats.read(tmp_path / "a.json").run.ranks) == 1


def test_chrome_processes_whose_ids_name_ranks_are_ranks(tmp_path: Path) -> None:
    spans = [
        {"ph": "X", "cat": "work", "name": "f", "pid": f"rank{rank}_7", "tid": 1, "ts": 5, "dur": 9}
        for rank in range(3)
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": spans}))
    run = formats.read(tmp_path / "a.json").run
    assert [info.rank for info in run.ranks] == [0, 1, 2]
    assert not any("states no rank" in note for note in run.notes)
