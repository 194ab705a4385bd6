"""Waiting is followed back to where it began: programs whose cause is known."""

from __future__ import annotations

import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import programs

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.report.text_report import render_report

STEPS = 6


def _analyzed(build_class, program):
    with tempfile.TemporaryDirectory() as folder:
        built = build_class(Path(folder) / "trace", len(program))
        programs.write(built, programs.run(program))
        return built.trace().analyze()


def _check_sums(analysis):
    """All waiting has a cause on a rank, direct or propagated."""
    waiting, causes = analysis.waiting, analysis.root_causes
    due = sum(cause.direct_us + cause.propagated_us for cause in causes)
    assert due == pytest.approx(waiting.total_us)
    assert sum(row.waits_us for row in waiting.ranks) == pytest.approx(waiting.total_us)
    assert sum(row.causes_us for row in waiting.ranks) == pytest.approx(waiting.total_us)
    assert sum(cause.share for cause in causes) == pytest.approx(1 if waiting.total_us else 0)
    assert all(cause.direct_us >= 0 and cause.propagated_us >= 0 for cause in causes)


def _pipeline(stage_us, link_us=None, microbatches=4):
    return programs.pipeline(
        1, stage_us=stage_us, steps=STEPS, microbatches=microbatches, link_us=link_us or {}
    )


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_stage_is_named_and_not_the_stages_that_wait(build_class, slow):
    stages = [100] * 4
    stages[slow] = 300
    analysis = _analyzed(build_class, _pipeline(stages))
    _check_sums(analysis)
    main = analysis.root_causes[0]
    assert (main.rank, main.activity, main.peer) == (slow, "compute", None)
    assert main.share > 0.8
    assert main.name in (f"stage{slow}.f", f"stage{slow}.b")
    assert main.propagated_us > 0
    text = " ".join(render_report(analysis).split())
    assert f"because compute ({main.name}) on rank {slow} takes longer" in text
    (finding,) = [one for one in analysis.findings if one.kind == "straggler"]
    assert f"on rank {slow}" in finding.evidence
    # As the same pipeline without the longer stage; the first step is warm-up.
    before, after = programs.run(_pipeline(stages)), programs.run(_pipeline([100] * 4))
    took = [played.end() - played.end_of(0) for played in (before, after)]
    saved = (took[0] - took[1]) / (STEPS - 1)
    assert saved - 10 <= finding.saves_us <= 1.05 * saved + 10


def test_stages_that_are_unequal_by_design(build_class):
    analysis = _analyzed(build_class, _pipeline([100, 150, 300, 200]))
    _check_sums(analysis)
    assert (analysis.root_causes[0].rank, analysis.root_causes[0].activity) == (2, "compute")
    by_rank = {row.rank: row.causes_us for row in analysis.waiting.ranks}
    assert by_rank[2] == max(by_rank.values())
    assert by_rank[2] > 3 * by_rank[0]


def test_a_slow_link_is_named_by_both_its_ends(build_class):
    analysis = _analyzed(build_class, _pipeline([100] * 4, {1: 200}))
    _check_sums(analysis)
    forth, back = analysis.root_causes[:2]
    assert {(cause.activity, cause.peer, cause.rank) for cause in (forth, back)} == {
        ("transfer", 1, 2),
        ("transfer", 2, 1),
    }
    assert forth.share + back.share > 0.9
    # What blocked receives took longer than on the other links: 190 us in each of 4 microbatches.
    assert (forth.slower_us, back.slower_us) == (pytest.approx(760), pytest.approx(760))
    assert "messages from rank" in " ".join(render_report(analysis).split())


def test_lateness_that_travels_along_a_ring(build_class):
    program = programs.ring(1, ranks=5, steps=STEPS, late={1: 500}, link_us={})
    analysis = _analyzed(build_class, program)
    _check_sums(analysis)
    main = analysis.root_causes[0]
    assert (main.rank, main.activity, main.name) == (1, "compute", "net")
    # The next rank waits for it, all others for those that wait.
    assert main.share > 0.85
    assert main.propagated_us > 2 * main.direct_us
    assert main.direct_us == pytest.approx(500, rel=0.06)
    assert main.saves_us == pytest.approx(500, rel=0.05)


def test_a_slow_link_of_a_ring(build_class):
    program = programs.ring(1, ranks=5, steps=STEPS, late={}, link_us={2: 200})
    analysis = _analyzed(build_class, program)
    _check_sums(analysis)
    main = analysis.root_causes[0]
    assert (main.rank, main.activity, main.peer) == (3, "transfer", 2)
    assert main.saves_us == pytest.approx(4 * 180, rel=0.05)


def test_two_causes_at_once(build_class):
    program = programs.ring(1, ranks=5, steps=STEPS, late={1: 500, 3: 300}, link_us={})
    analysis = _analyzed(build_class, program)
    _check_sums(analysis)
    first, second = analysis.root_causes[:2]
    assert (first.rank, second.rank) == (1, 3)
    assert first.activity == second.activity == "compute"
    assert first.name == second.name == "net"
    assert first.share > second.share > 0.25


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("activity", ["compute", "data"])
def test_a_late_rank_of_data_parallel_training(build_class, activity, overlapped):
    late = {(2, activity): 2500}
    program = programs.data_parallel(1, ranks=4, steps=STEPS, late=late, overlapped=overlapped)
    analysis = _analyzed(build_class, program)
    _check_sums(analysis)
    main = analysis.root_causes[0]
    assert (main.rank, main.activity) == (2, activity)
    assert main.share > 0.9
    straggler = analysis.stragglers[0]
    assert (straggler.rank, straggler.cause) == (2, activity)


@pytest.mark.parametrize("seed", [2, 71, 93])
def test_the_saving_of_a_late_rank_is_no_less_than_what_it_costs(build_class, seed):
    """Also where messages are launched before the work that is late is over."""
    late = {(1, "compute"): 900}
    program = programs.data_parallel(seed, ranks=3, steps=STEPS, late=late, overlapped=True)
    analysis = _analyzed(build_class, program)
    took = [
        played.end() - played.end_of(0)
        for played in map(programs.run, (program, programs.without_cause(program, "1 compute")))
    ]
    saved = (took[0] - took[1]) / (STEPS - 1)
    main = analysis.root_causes[0]
    assert (main.rank, main.activity) == (1, "compute")
    assert saved - 5 <= main.saves_us <= 1.05 * saved + 5


def test_whatever_the_program_waiting_sums_to_causes(build_class):
    for seed in range(12):
        print("seed", seed)
        chance = random.Random(seed)
        ranks = chance.randint(2, 5)
        program = [[] for _ in range(ranks)]
        for step in range(3):
            for number in range(chance.randint(1, 5)):
                key, us = f"{step}.{number}", chance.choice([0, 0, 7, 40])
                for ops in program:
                    activity = chance.choice(["compute", "data", "update", "host"])
                    took = chance.choice([0, chance.randint(1, 99)])
                    ops.append(programs.Op("work", "w", activity, took))
                if chance.random() < 0.5:
                    everybody = tuple(range(ranks))
                    for ops in program:
                        ops.append(programs.Op("collective", key, us=us, ranks=everybody))
                else:
                    chain = chance.sample(range(ranks), ranks)
                    for source, target in pairwise(chain):
                        name = f"{key}:{source}"
                        program[source].append(programs.Op("send", name, us=us, peer=target))
                        program[target].append(programs.Op("recv", name, us=us, peer=source))
            for ops in program:
                ops.append(programs.Op("work", "u", "update", 5))
                ops.append(programs.Op("step"))
        _check_sums(_analyzed(build_class, program))


def test_json_and_the_page_have_them(build, tmp_path):
    program = programs.ring(1, ranks=3, steps=STEPS, late={1: 500}, link_us={})
    built = build(3)
    programs.write(built, programs.run(program))
    page = tmp_path / "report.html"
    done = CliRunner().invoke(analyze, [str(built.write()), "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["root_causes"][0]["rank"] == 1
    assert value["waiting"]["total_us"] > 0
    assert 'id="root-causes"' in page.read_text()


def test_a_trace_without_steps_has_root_causes(build):
    built = build(2)
    for rank, came in ((0, 10), (1, 60)):
        one = built[rank]
        one.add("phase", 0, came, name="forward", phase="forward")
        message = one.message("all_reduce", came, 80, seq=0, bytes=4)
        one.wait(came, 80, message)
    analysis = built.trace().analyze()
    (cause,) = analysis.root_causes
    assert (cause.rank, cause.activity, cause.direct_us) == (1, "compute", 50)
    assert analysis.waiting.total_us == 50
