"""Jobs that run beside each other in one trace (`ddltrace.analyzer.trace.recorded_run`)."""

from __future__ import annotations

from dataclasses import replace

from ddltrace.analyzer.analysis import analyze
from ddltrace.tracer.trace.run_info import GroupInfo

MEETING = GroupInfo("weights", "", "gloo", (0, 1, 2), size=3, store="here:3")


def two_jobs(build, *, role="rollout", began_us=0.0):
    """Rank 0 is a job of two ranks' first, with rank 1; rank 2 is rank 0 of a job of one.

    The first is in messages until 1000 us.
    """
    built = build(3)
    for rank in range(3):
        later = rank == 2
        groups = [
            GroupInfo("0", "default", "gloo", (0,) if later else (0, 1)),
            replace(MEETING, place=rank),
        ]
        built[rank].info_changes |= {
            "rank": 0 if later else rank,
            "world_size": 1 if later else 2,
            "role": role if later else role and "trainer",
            "store": "here:2" if later else "here:1",
            "groups": groups,
            "clock": {
                "monotonic_ns": round(began_us * 1000) if later else 0,
                "unix_ns": round(began_us * 1000) if later else 0,
                "samples": [{"local_ns": 0, "offset_ns": 0, "rtt_ns": 10}],
            },
        }
    for rank in (0, 1):
        built[rank].message("broadcast", 0, 100, seq=0, peer=1)
        built[rank].message("broadcast", 900, 1000, seq=1, peer=1)
    return built


def test_ranks_groups_and_peers_are_numbered_one_job_after_the_other(build):
    built = two_jobs(build)
    for rank in range(3):
        built[rank].message("broadcast", 500, 600, seq=0, peer=2, group="weights")
    built[2].message("broadcast", 700, 800, seq=0, peer=0)
    trace = built.trace()
    assert trace.ranks == [0, 1, 2]
    assert [trace.group_ranks(name) for name in ("0 (ranks 0-1)", "0 (ranks 2)", "weights")] == [
        *((0, 1), (2,), (0, 1, 2)),
    ]
    peers = [row["peer"] for row in trace.events(2).to_pylist()]
    assert peers == [2, 2]
    assert [row["group"] for row in trace.events(2).to_pylist()] == ["weights", "0 (ranks 2)"]
    joining = analyze(trace).joining
    assert (joining.collectives, joining.complete) == (4, 4)
    assert trace.own_rank(trace.infos(2)[0]) == 0


def test_a_member_without_a_trace_leaves_the_group_incomplete(build):
    built = two_jobs(build)
    for rank in range(3):
        default, meeting = built[rank].info_changes["groups"]
        changed = replace(meeting, ranks=(0, 1, 2, 3), size=4)
        built[rank].info_changes["groups"] = [default, changed]
        built[rank].message("broadcast", 500, 600, seq=0, peer=3, group="weights")
    trace = built.trace()
    assert (trace.group_ranks("weights"), trace.group_size("weights")) == ((), 4)
    assert [row["peer"] for row in trace.events(2).to_pylist()] == [None]
    joining = analyze(trace).joining
    assert (joining.collectives, joining.complete, joining.partial) == (3, 2, 1)


def test_jobs_that_met_nowhere_are_beside_each_other_if_they_overlap(build):
    built = two_jobs(build, began_us=500.0)
    for rank in range(3):
        built[rank].info_changes["groups"] = built[rank].info_changes["groups"][:1]
    assert built.trace().ranks == [0, 1, 2]


def test_jobs_one_after_the_other_are_generations(build):
    built = two_jobs(build, began_us=2000.0)
    for rank in range(3):
        built[rank].info_changes["groups"] = built[rank].info_changes["groups"][:1]
    trace = built.trace()
    assert trace.ranks == [0, 1]
    assert len(trace.infos(0)) == 2


def test_without_roles_a_smaller_job_is_left_out(build):
    trace = two_jobs(build, role=None, began_us=500.0).trace()
    assert trace.ranks == [0, 1]
    assert any("left out" in note for note in trace.notes)


def test_samples_of_another_rank_0_on_another_clock_are_not_used(build):
    built = two_jobs(build)
    built[2].info_changes["clock_domain"] = "elsewhere"
    trace = built.trace()
    assert trace.infos(1)[0].clock["samples"]
    assert trace.infos(2)[0].clock["samples"] == []


def test_notes_of_the_launcher_say_the_role(build):
    built = two_jobs(build)
    built[2].info_changes["status"] = "killed"
    assert "rank 0 of rollout ended without closing its trace" in built.trace().notes
