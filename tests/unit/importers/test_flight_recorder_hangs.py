"""Hangs in generated dumps of the Flight Recorder, compared with PyTorch's own `torchfrtrace`.

`torchfrtrace` compares every rank with the first one, so it names all other ranks if the first
one differs; here both sides of a disagreement are compared. It says nothing about a collective that
a rank without a dump may have entered; the report names that rank as one of which this is unknown.
"""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.write_imported import save
from ddltrace.analyzer.measures.hangs import Hang
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.notes import notes_of
from ddltrace.analyzer.report.sentences import hang_text, mismatch_text

GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (1, 2)}
OPS = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
BEGIN = 1_700_000_000_000_000_000
FAULTS = ("nothing", "never enters", "never completes", "no dump", "size", "dtype", "operation")

Dumps = dict[int, dict[str, Any]]


def program(chance: random.Random) -> list[tuple[str, str]]:
    """Group and operation of each call. All groups are used, by the same number on each rank."""
    calls = []
    for _ in range(chance.randint(4, 8)):
        calls += [(group, chance.choice(OPS)) for group in ("0", "1", "2")]
    return calls


def entry(group: str, op: str, seq: int, at: int, **changes: Any) -> dict[str, Any]:
    size = len(GROUPS[group])
    sizes = {"_all_gather_base": (64, 64 * size), "_reduce_scatter_base": (64 * size, 64)}
    given, taken = sizes.get(op, (64, 64))
    return {
        "pg_id": int(group),
        "process_group": (group, "default_pg" if group == "0" else f"group {group}"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": at,
        "input_sizes": [[given, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[taken, 4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": at + 2_000,
        "time_discovered_completed_ns": at + 100_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **changes,
    }


PENDING = {
    "state": "started",
    "time_discovered_completed_ns": None,
    "retired": False,
}


def changed(op: str, fault: str, chance: random.Random) -> dict[str, Any]:
    """How the entry of the rank with the fault differs."""
    if fault == "size":
        return {"input_sizes": [[65, 4]], "output_sizes": [[65, 4]]}
    if fault == "dtype":
        return {"input_dtypes": ["Int"], "output_dtypes": ["Int"]}
    if fault == "never completes":
        return {}
    return {"profiling_name": f"nccl:{chance.choice([each for each in OPS if each != op])}"}


def happen(
    one: dict[str, Any],
    fault: str,
    chance: random.Random,
    *,
    on_faulty: bool,
    first: bool,
    blocked: bool,
) -> bool:
    """Changes an entry from the fault on; returns whether the rank still makes this call."""
    if fault == "nothing":
        return True
    if fault in ("never enters", "no dump"):
        if blocked:
            one.update(PENDING)
        return not on_faulty
    if on_faulty or fault != "never completes":
        one.update(PENDING)
    if on_faulty:
        one.update(changed(one["profiling_name"].removeprefix("nccl:"), fault, chance))
    return first


def generate(seed: int, fault: str) -> tuple[Dumps, int]:
    """The dumps of four ranks and the rank with the fault."""
    chance = random.Random(f"{seed} {fault}")
    calls, rank = program(chance), chance.randrange(4)
    in_reach = [place for place, (group, _) in enumerate(calls) if rank in GROUPS[group]]
    place = chance.choice(in_reach[len(in_reach) // 2 :])
    blocked = {
        group: GROUPS[group] for group in GROUPS if fault != "nothing" and rank in GROUPS[group]
    }
    dumps: Dumps = {}
    for r in range(4):
        entries, numbers = [], dict.fromkeys(GROUPS, 0)
        for number, (group, op) in enumerate(calls):
            if r not in GROUPS[group]:
                continue
            numbers[group] += 1
            one = entry(group, op, numbers[group], BEGIN + 1_000_000 * number + 1_000 * r)
            if number >= place and not happen(
                one,
                fault,
                chance,
                on_faulty=r == rank,
                first=number == place,
                blocked=group in blocked,
            ):
                break
            entries.append(one)
        for number, one in enumerate(entries):
            one["record_id"] = number
        lost = chance.randrange(4) if chance.random() < 0.5 else 0
        dumps[r] = {
            "version": "2.10",
            "pg_config": {
                name: {
                    "name": name,
                    "desc": "default_pg" if name == "0" else f"group {name}",
                    "ranks": str(list(ranks)),
                }
                for name, ranks in GROUPS.items()
                if r in ranks
            },
            "entries": entries[lost:],
        }
    if fault == "no dump":
        del dumps[rank]
    return dumps, rank


Verdict = dict[str, tuple[int, frozenset[int], frozenset[frozenset[int]]]]
"""Group -> its first faulty collective: number, missing ranks, both sides of a disagreement."""


def sides(ranks: set[int], group: str) -> frozenset[frozenset[int]]:
    """The ranks that stand against the others of their group."""
    rest = frozenset(GROUPS[group]) - ranks
    return frozenset({frozenset(ranks), rest}) if ranks else frozenset()


def torchfrtrace(dumps: Dumps) -> Verdict:
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    details = {
        f"rank_{rank}": {"rank": rank, "host_name": "", **copy.deepcopy(dump)}
        for rank, dump in dumps.items()
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=1000
    )
    verdict: Verdict = {}
    for found in builder.build_db(details, options, "2.10").collectives:
        differing = set(found.mismatch_collectives or {})
        missing = frozenset(found.missing_ranks or ())
        if missing or differing:
            group = found.group_id
            new = (found.collective_seq_id, missing, sides(differing, group))
            verdict[group] = min(verdict.get(group, new), new, key=lambda one: one[0])
    return verdict


def analysis_of(dumps: Dumps, path: Path, *, as_json: bool = False) -> Analysis:
    (path / "dumps").mkdir()
    for rank, dump in dumps.items():
        content = json.dumps(dump).encode() if as_json else pickle.dumps(dump)
        (path / "dumps" / f"nccl_trace_rank_{rank}").write_bytes(content)
    save(formats.read(path / "dumps"), path / "trace", force=False)
    return analyze(open_trace(path / "trace"))


def hangs_of(dumps: Dumps, path: Path) -> tuple[Hang, ...]:
    return analysis_of(dumps, path).hangs


def disagreement(hang: Hang) -> set[int]:
    texts = hang.called or hang.passed
    if not texts:
        return set(hang.completed)
    first = texts[min(texts)]
    return {rank for rank, text in texts.items() if text == first}


def verdict_of(hangs: tuple[Hang, ...]) -> Verdict:
    verdict: Verdict = {}
    for hang in hangs:
        if hang.missing or hang.completed or hang.called or hang.passed:
            assert hang.seq is not None
            differing = set() if hang.missing else disagreement(hang)
            new = (hang.seq, frozenset(hang.missing), sides(differing, hang.group))
            verdict[hang.group] = min(verdict.get(hang.group, new), new, key=lambda one: one[0])
    return verdict


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(6))
def test_the_verdict_is_that_of_torchfrtrace(tmp_path: Path, seed: int, fault: str) -> None:
    dumps, rank = generate(seed, fault)
    analysis = analysis_of(dumps, tmp_path, as_json=seed % 2 == 1)
    hangs = analysis.hangs
    expected = torchfrtrace(dumps)
    assert verdict_of(hangs) == expected
    assert not analysis.mismatches
    assert bool(expected) == (fault not in ("nothing", "no dump"))
    if fault == "nothing":
        assert hangs == ()
        return
    assert hangs
    if fault == "no dump":
        assert all(hang.unknown == (rank,) for hang in hangs)
        assert f"whether rank {rank} did is not recorded" in hang_text(hangs[0])
    elif fault == "never enters":
        assert all(hang.missing == (rank,) for hang in hangs)
    for hang in hangs:
        assert hang.timeout_us == 600e6
        assert hang.waited_us is None or (hang.waited_us > 0 and hang.waited_at_least)


@pytest.mark.parametrize("fault", ["nothing", "size", "dtype", "operation"])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_disagree_on_what_completed_are_those_of_torchfrtrace(
    tmp_path: Path, seed: int, fault: str
) -> None:
    dumps, rank = generate(seed, fault)
    for dump in dumps.values():
        for one in dump["entries"]:
            one.update(
                state="completed",
                retired=True,
                time_discovered_completed_ns=one["time_created_ns"] + 100_000,
            )
    analysis = analysis_of(dumps, tmp_path, as_json=seed % 2 == 1)
    assert not analysis.hangs
    verdict: Verdict = {}
    for each in analysis.mismatches:
        assert each.seq is not None
        texts = each.called or each.passed
        differing = {r for r, text in texts.items() if text == texts[min(texts)]}
        verdict[each.group] = (each.seq, frozenset(), sides(differing, each.group))
    assert verdict == torchfrtrace(dumps)
    assert bool(verdict) == (fault != "nothing")
    for each in analysis.mismatches:
        text = mismatch_text(each)
        assert f"number {each.seq} of group {each.group}" in text
        assert f"rank {rank} " in text
        assert any(text in note for note in notes_of(analysis))


PAIRS = {"1": (0, 1), "2": (2, 3)}


def pairs(seed: int, fault: str, *, completed: bool) -> tuple[Dumps, str]:
    """Sends and receives in groups of two, and the group in whose last one the fault is."""
    chance = random.Random(f"pairs {seed} {fault}")
    faulty = chance.choice(list(PAIRS))
    dumps: Dumps = {}
    for group, ranks in PAIRS.items():
        for rank in ranks:
            config = {group: {"name": group, "desc": f"group {group}", "ranks": str(list(ranks))}}
            dumps[rank] = {"version": "2.10", "pg_config": config, "entries": []}
        count = chance.randint(2, 5)
        for number in range(1, count + 1):
            source = chance.randrange(2)
            is_last = group == faulty and number == count and fault != "nothing"
            for side in ("send", "recv"):
                place = source if side == "send" else 1 - source
                if is_last and (side, fault) in {
                    ("send", "never sent"),
                    ("recv", "never received"),
                }:
                    continue
                arrow = f"{source}->{1 - source}" if side == "send" else f"{place}<-{source}"
                one = entry(
                    group,
                    "all_reduce",
                    0,
                    BEGIN + 1_000_000 * number + (side == "recv") * 1_000,
                    profiling_name=f"nccl:{side} {arrow}",
                    p2p_seq_id=number,
                    is_p2p=True,
                    output_sizes=[[64, 4]],
                )
                if is_last and side == "recv" and fault == "size":
                    one["output_sizes"] = [[65, 4]]
                if is_last and not completed:
                    one.update(PENDING)
                entries = dumps[ranks[place]]["entries"]
                entries.append(one | {"record_id": len(entries)})
    return dumps, faulty


@pytest.mark.parametrize("fault", ["nothing", "never sent", "never received", "size"])
@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sends_and_receives_are_judged_as_by_torchfrtrace(
    tmp_path: Path, seed: int, completed: bool, fault: str
) -> None:
    dumps, faulty = pairs(seed, fault, completed=completed)
    analysis = analysis_of(dumps, tmp_path, as_json=seed % 2 == 1)
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    details = {
        f"rank_{rank}": {"rank": rank, "host_name": "", **copy.deepcopy(dump)}
        for rank, dump in dumps.items()
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=1000
    )
    collectives = builder.build_db(details, options, "2.10").collectives
    wrong = [each for each in collectives if each.missing_ranks or each.mismatch_collectives]
    assert {each.group_id for each in wrong} == ({faulty} if fault != "nothing" else set())
    hangs = [hang for hang in analysis.hangs if hang.missing or hang.passed]
    if fault == "size":
        [found] = analysis.mismatches if completed else hangs
        assert set(found.passed) == set(PAIRS[faulty])
        assert {text.split()[1] for text in found.passed.values()} == {"1,024", "1,040"}
        assert not (hangs if completed else analysis.mismatches)
    elif fault == "nothing" or completed:
        assert not hangs
        assert not analysis.mismatches
        assert analysis.joining.p2p_unmatched == (fault != "nothing")
    else:
        [hang] = hangs
        [other] = wrong
        assert set(hang.missing) == set(other.missing_ranks)
        assert hang.group == faulty


def test_the_wait_is_that_until_the_latest_time_in_any_dump(tmp_path: Path) -> None:
    """Rank 1 never enters; what it began last is the latest time."""
    first = [entry("1", "all_reduce", 1, BEGIN, record_id=0)]
    second = entry("1", "all_reduce", 2, BEGIN + 10_000_000, record_id=1, **PENDING)
    second["time_discovered_started_ns"] = None
    config = {"1": {"name": "1", "desc": "pair", "ranks": "[0, 1]"}}
    dumps: Dumps = {
        rank: {"version": "2.10", "pg_config": config, "entries": copy.deepcopy(first)}
        for rank in (0, 1)
    }
    dumps[0]["entries"].append(second)
    (tmp_path / "a").mkdir()
    [hang] = hangs_of(dumps, tmp_path / "a")
    assert (hang.seq, hang.missing, hang.waited_us) == (2, (1,), None)
    assert "for how long is not known (the group's timeout is 600 s)" in hang_text(hang)

    second["time_discovered_started_ns"] = BEGIN + 13_000_000
    (tmp_path / "b").mkdir()
    [hang] = hangs_of(dumps, tmp_path / "b")
    assert (hang.waited_us, hang.waited_at_least) == (3000.0, True)
    assert "for at least 3.00 ms" in hang_text(hang)
