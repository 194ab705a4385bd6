"""The roles of a job (`ddltrace.analyzer.measures.roles`)."""

from __future__ import annotations

import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.trace.run_info import GroupInfo

TRAINER, ROLLOUT = (0, 1), (2, 3)


def iteration(built, number, start):
    """1000 us: rollouts 500, trainers 300 (100 of them an all_reduce), weights to all 200.

    The rollouts begin to wait for the weights at 600, the trainers send them at 800.
    """
    for rank in ROLLOUT:
        built[rank].add("phase", start, start + 500, name="forward")
        built[rank].message(
            "broadcast", start + 600, start + 1000, seq=number, peer=0, bytes=64, out_bytes=64
        )
    for rank in TRAINER:
        built[rank].add("phase", start + 500, start + 700, name="forward")
        built[rank].message(
            "all_reduce", start + 700, start + 800, seq=number, group="1", bytes=400, out_bytes=400
        )
        built[rank].message(
            "broadcast", start + 800, start + 1000, seq=number, peer=0, bytes=64, out_bytes=64
        )


def roles_job(build, *, steps=0, stepping=TRAINER):
    """One iteration without steps, or one in each step of some ranks."""
    built = build(4)
    built.groups.append(GroupInfo("1", "trainers", "gloo", TRAINER))
    for rank in range(4):
        built[rank].info_changes["role"] = "trainer" if rank in TRAINER else "rollout"
    for number in range(max(steps, 1)):
        if steps:
            for rank in stepping:
                built[rank].step = number
                built[rank].whole_step(number, 1000.0 * number, 1000.0 * (number + 1))
        iteration(built, number, 1000.0 * number)
    return built


def test_parts_of_time_and_who_is_waited_for(build):
    rollout, trainer = analyze(roles_job(build).trace()).roles
    assert (rollout.role, rollout.ranks, trainer.role, trainer.ranks) == (
        *("rollout", ROLLOUT),
        *("trainer", TRAINER),
    )
    assert (rollout.wall_us, rollout.busy_us, rollout.crossing_us, rollout.idle_us) == (
        *(1000, 500, 400, 100),
    )
    assert (trainer.busy_us, trainer.crossing_us, trainer.idle_us) == (300, 200, 500)
    assert trainer.idle_share == pytest.approx(0.5)
    assert (trainer.idle_beside, trainer.idle_beside_us) == ("rollout", 500)
    assert (rollout.idle_beside, rollout.idle_beside_us) == ("trainer", 100)
    assert (trainer.messages, trainer.bytes, rollout.messages, rollout.bytes) == (1, 64, 1, 64)
    assert (rollout.wait_us, rollout.waits_for, rollout.waits_for_us) == (200, "trainer", 200)
    assert (trainer.wait_us, trainer.waits_for, trainer.waits_for_us) == (0, None, None)


def test_of_a_rank_without_steps_the_time_of_the_steady_steps_counts(build):
    analysis = analyze(roles_job(build, steps=6).trace())
    rollout, trainer = analysis.roles
    assert rollout.wall_us == 1000 * analysis.summary.steps < 6000
    for row in (rollout, trainer):
        assert row.busy_us + row.crossing_us + row.idle_us == row.wall_us
        assert row.messages == analysis.summary.steps
    assert rollout.idle_us == 100 * analysis.summary.steps


@pytest.mark.parametrize("stepping", [TRAINER, TRAINER + ROLLOUT], ids=["trainers", "all"])
def test_ranges_of_steps_are_added_up(build, stepping):
    path = roles_job(build, steps=40, stepping=stepping).write()
    whole, trace = open_trace(path), open_trace(path)
    trace.memory_limit = 1 << 14
    analysis = trace.analyze()
    assert "were analyzed in" in analysis.trace.notes[-1]
    rollout, trainer = analysis.roles
    expected = whole.analyze().roles
    if stepping != TRAINER:
        assert (rollout, trainer) == expected
        return
    # Events of ranks without steps are not read.
    assert (rollout.busy_us, rollout.idle_us, trainer.idle_beside) == (None, None, None)
    assert (trainer.busy_us, trainer.idle_us) == (expected[1].busy_us, expected[1].idle_us)


def test_a_send_between_roles_crosses_them(build):
    built = build(3)
    for rank, role in enumerate(("sampler", "learner", "learner")):
        built[rank].info_changes["role"] = role
        built[rank].add("phase", 0, 100, name="forward")
    built[0].message("send", 400, 500, seq=0, peer=1, bytes=32)
    built[1].message("recv", 100, 500, seq=0, peer=0, out_bytes=32)
    built[1].message("send", 500, 600, seq=0, peer=2, bytes=8)
    built[2].message("recv", 500, 600, seq=0, peer=1, out_bytes=8)
    learner, sampler = analyze(built.trace()).roles
    assert (learner.messages, learner.bytes, sampler.messages, sampler.bytes) == (1, 32, 1, 32)
    assert (learner.wait_us, learner.waits_for) == (300 / 2, "sampler")


def test_times_are_unknown_without_compute(build):
    built = roles_job(build)
    for rank in ROLLOUT:
        built[rank].rows = [row for row in built[rank].rows if row["kind"] != "phase"]
    rollout, trainer = analyze(built.trace()).roles
    assert (rollout.busy_us, rollout.crossing_us, rollout.idle_us) == (None, None, None)
    assert trainer.idle_beside is None
    assert (rollout.waits_for, rollout.wait_us) == ("trainer", 200)


def test_one_role_has_no_rows(build):
    built = roles_job(build)
    for rank in range(4):
        built[rank].info_changes["role"] = "Worker"
    trace = built.trace()
    assert analyze(trace).roles == ()
    assert "Roles" not in render_report(analyze(trace))


def test_the_report_and_sql_have_the_rows(build):
    built = roles_job(build)
    for rank in TRAINER:
        built[rank].info_changes["role"] = "tra\x1biner"
    trace = built.trace()
    text = render_report(analyze(trace))
    assert "Roles, means" in text
    assert r"tra\x1biner (200 µs)" in text
    rows = run_query(trace, "SELECT role, waits_for FROM roles ORDER BY role").to_pylist()
    assert rows == [
        {"role": "rollout", "waits_for": "tra\x1biner"},
        {"role": "tra\x1biner", "waits_for": None},
    ]
