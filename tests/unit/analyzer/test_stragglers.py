"""Who is late, how often and why: generated steps whose answer is known."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.report.text_report import render_report

STEPS = 21
RANKS = 4
LATE = 500.0


def _training(built, late, *, jitter=1.0, network=frozenset(), collects=None):
    """Four ranks, two buckets a step.

    Data 100, forward 400 to the first bucket, 300 more to the second, 100 of other code,
    optimizer 50 us.

    Args:
        built: The trace.
        late: (step, rank) -> what takes `LATE` longer: data, compute, host or update.
        jitter: Random variation of every time (us), so that every collective has a last rank.
        network: (step, rank): this rank gets the result of the first bucket `LATE` later than
            the others, which continue, and so comes late to the second.
        collects: What each rank collects of garbage while it is late (us); None if that was not
            recorded.
    """
    random = np.random.default_rng(7)
    begin = np.zeros(RANKS)
    for number in range(STEPS):
        extra = [
            {name: LATE * (late.get((number, rank)) == name) for name in _PARTS}
            for rank in range(RANKS)
        ]
        noise = random.uniform(0, jitter, (RANKS, 2))
        data = [begin[r] + 100 + extra[r]["data"] for r in range(RANKS)]
        first = [data[r] + 400 + extra[r]["compute"] + noise[r][0] for r in range(RANKS)]
        done = max(first) + 200
        got = [done + LATE * ((number, rank) in network) for rank in range(RANKS)]
        second = [got[r] + 300 + noise[r][1] for r in range(RANKS)]
        over = max(second) + 200
        for rank in range(RANKS):
            one = built[rank]
            one.step = number
            one.info_changes["collections"] = collects is not None
            if collects and extra[rank]["compute"]:
                start = first[rank] - collects
                one.add("marker", start, first[rank], name="garbage collection")
            one.add("data", begin[rank], data[rank], name="next batch")
            one.add("phase", data[rank], second[rank], name="forward")
            for bucket, (start, end) in enumerate(((first[rank], got[rank]), (second[rank], over))):
                message = one.message(
                    "all_reduce", start, end, seq=2 * number + bucket, bytes=4, out_bytes=4
                )
                one.wait(start, end, message)
            host = over + 100 + extra[rank]["host"]
            end = host + 50 + extra[rank]["update"]
            one.add("phase", host, end, name="optimizer")
            one.whole_step(number, begin[rank], end)
            begin[rank] = end
    return built.trace()


_PARTS = ("data", "compute", "host", "update")


def _worst(trace):
    return trace.analyze().stragglers[0]


@pytest.mark.parametrize("cause", ["data", "compute"])
def test_a_rank_that_is_late_in_every_step(build, cause):
    late = {(number, 2): cause for number in range(STEPS)}
    row = _worst(_training(build(RANKS), late))
    assert (row.rank, row.cause, row.sometimes) == (2, cause, False)
    assert row.cause_us == pytest.approx(LATE, abs=2)
    assert row.late_step_us == pytest.approx(LATE, abs=2)
    assert row.late_steps == 16  # 80 % of 20
    assert row.steps_share == pytest.approx(0.8)


@pytest.mark.parametrize("cause", ["data", "compute"])
def test_a_rank_that_is_late_in_some_steps_only(build, cause):
    trace = _training(build(RANKS), {(number, 2): cause for number in (5, 11, 12)})
    analysis = trace.analyze()
    row = analysis.stragglers[0]
    assert (row.rank, row.cause, row.sometimes) == (2, cause, True)
    assert (row.late_steps, row.steps_share) == (3, pytest.approx(3 / 20))
    assert row.late_step_us == pytest.approx(LATE, abs=2)
    assert row.cause_us == pytest.approx(LATE, abs=2)
    text = " ".join(render_report(analysis).split())
    assert "Rank 2 is late mainly in 3 of 20 steps, by 5" in text
    named = "data loading" if cause == "data" else cause
    assert re.search(rf": its {named} takes 5\S* .?s longer in such a step\.", text)


@pytest.mark.parametrize("steps", [range(STEPS), (5, 11, 12)])
@pytest.mark.parametrize(("collects", "is_most"), [(400.0, True), (100.0, False), (None, False)])
def test_garbage_collections_of_a_late_rank(build, steps, collects, is_most):
    late = {(number, 2): "compute" for number in steps}
    analysis = _training(build(RANKS), late, collects=collects).analyze()
    row = analysis.stragglers[0]
    assert (row.rank, row.cause) == (2, "compute")
    assert row.gc_us == (None if collects is None else pytest.approx(collects))
    counted = len([step for step in steps if step])  # the first step is warm-up
    expected = [None] * RANKS if collects is None else [0, 0, collects * counted, 0]
    assert [each.gc_us for each in analysis.ranks] == pytest.approx(expected)
    text = " ".join(render_report(analysis).split())
    assert (", most of it in Python's garbage collector" in text) == is_most
    (finding,) = (each for each in analysis.findings if each.kind == "straggler")
    assert ("gc.freeze()" in finding.advice) == is_most


@pytest.mark.parametrize("cause", ["host", "update"])
def test_what_holds_a_rank_up_at_the_end_of_its_step_makes_it_late_in_the_next(build, cause):
    late = {(number, 1): cause for number in range(STEPS)}
    row = _worst(_training(build(RANKS), late))
    assert (row.rank, row.cause, row.sometimes) == (1, cause, False)
    assert row.cause_us == pytest.approx(LATE, abs=2)


@pytest.mark.parametrize(
    ("hosts", "reported", "advice"),
    [(1, "own transfer", "takes its core"), (2, "own network", "own link")],
)
def test_a_rank_that_is_late_because_of_its_own_network(build, hosts, reported, advice):
    network = frozenset((number, 3) for number in range(STEPS))
    built = build(RANKS)
    for rank in range(RANKS):
        built[rank].info_changes = {"host": f"host{rank % hosts}"}
    analysis = _training(built, {}, network=network).analyze()
    row = analysis.stragglers[0]
    assert (row.rank, row.cause, row.sometimes) == (3, "network", False)
    assert row.cause_us == pytest.approx(LATE, abs=2)
    text = " ".join(render_report(analysis).split())
    assert f": its {reported} takes 5" in text
    finding = next(finding for finding in analysis.findings if finding.kind == "straggler")
    assert advice in finding.advice


def test_its_own_network_in_some_steps_only(build):
    row = _worst(_training(build(RANKS), {}, network=frozenset({(6, 0), (14, 0)})))
    assert (row.rank, row.cause, row.sometimes, row.late_steps) == (0, "network", True, 2)
    assert row.cause_us == pytest.approx(LATE, abs=2)


def test_a_slow_network_on_a_device_is_not_taken_for_its_host(build):
    """Kernels and collectives on streams; the host only launches."""
    built, begin = build(RANKS), 0.0
    for number in range(STEPS):
        for rank in range(RANKS):
            one = built[rank]
            one.step = number
            got = begin + 300 + LATE * (rank == 1)
            one.add("kernel", begin, begin + 100 + rank / 10, lane="stream-7", name="gemm")
            first = begin + 100 + rank / 10
            one.message("all_reduce", first, got, lane="stream-20", seq=2 * number, bytes=4)
            one.add("kernel", got, got + 200, lane="stream-7", name="gemm")
            one.message(
                "all_reduce", got + 200, begin + 1200, lane="stream-20", seq=2 * number + 1, bytes=4
            )
            one.whole_step(number, begin, begin + 1200)
        begin += 1200
    row = _worst(built.trace())
    assert (row.rank, row.cause) == (1, "network")
    assert row.cause_us == pytest.approx(LATE, abs=2)


def test_ranks_that_take_turns_are_not_blamed_one_by_one(build):
    late = {(number, number % RANKS): "compute" for number in range(STEPS)}
    analysis = _training(build(RANKS), late).analyze()
    assert {row.rank for row in analysis.stragglers[:4]} == set(range(RANKS))
    assert "No single rank delays the others" in " ".join(render_report(analysis).split())


def test_json_tells_the_same(build):
    trace = _training(build(RANKS), {(5, 2): "data", (9, 2): "data"})
    result = CliRunner().invoke(analyze, [str(trace.path), "--json"])
    row = json.loads(result.stdout)["stragglers"][0]
    assert (row["rank"], row["cause"], row["sometimes"], row["late_steps"]) == (2, "data", True, 2)


def test_without_steps_nothing_is_said_of_them(build):
    built = build(2)
    for rank in range(2):
        built[rank].message("all_reduce", 10 + rank, 50, seq=0, bytes=4)
    row = _worst(built.trace())
    assert (row.late_steps, row.late_step_us, row.sometimes) == (0, None, False)
