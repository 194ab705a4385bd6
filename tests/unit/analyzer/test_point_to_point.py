"""Jobs of sends and receives get what collectives have: fits, findings, and pipeline bubbles."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support import programs

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.report.text_report import render_report

STEPS = 6


def _traced(built, program):
    played = programs.run(program)
    programs.write(built, played)
    return played, built.trace().analyze()


def _ring_of_sizes(latency, us_per_byte, *, slow=None):
    """A ring whose messages have five sizes; of one link the latency is 100 us longer."""
    program = programs.ring(1, ranks=3, steps=STEPS, late={}, link_us={})
    sizes = [1 << power for power in range(12, 22, 2)]

    def sized(rank, op):
        if op.do not in ("send", "recv"):
            return op
        size = sizes[sum(map(ord, op.name.partition(":")[0])) % len(sizes)]
        sender = rank if op.do == "send" else op.peer
        us = latency + round(us_per_byte * size) + 100 * (sender == slow)
        return replace(op, bytes=size, us=us)

    return programs.without(program, sized)


def test_latency_and_bandwidth_of_all_links_and_of_each(build):
    _, analysis = _traced(build(3), _ring_of_sizes(40, 0.001, slow=1))
    fits = {(fit.src, fit.dst): fit for fit in analysis.cost_fits}
    assert set(fits) == {(None, None), (0, 1), (1, 2), (2, 0)}
    for link, latency in (((0, 1), 40), ((1, 2), 140), ((2, 0), 40)):
        fit = fits[link]
        assert (fit.op, fit.verdict) == ("send", "fitted")
        assert fit.latency_us == pytest.approx(latency, abs=1)
        assert fit.algbw_gbps == pytest.approx(8, rel=0.01)
        assert fit.alpha_us == fit.latency_us
    assert "send 1 -> 2" in render_report(analysis)


def test_rows_of_pairs_have_medians_and_bandwidth(build):
    _, analysis = _traced(build(3), _ring_of_sizes(40, 0.001))
    for row in analysis.p2p:
        assert row.transfer_us_p50 <= row.transfer_us_p95
        assert row.transfer_us_p50 * row.count == pytest.approx(row.transfer_us, rel=0.9)
        assert 0 < row.algbw_gbps < 8
        assert not row.unsure


def test_a_ring_by_hand_gets_a_communication_finding_that_fits_it(build):
    _, analysis = _traced(build(3), _ring_of_sizes(200, 0.0001))
    reported = {finding.kind: finding for finding in analysis.findings}
    finding = reported["communication"]
    assert 0 < finding.saves_us <= analysis.savings.transfer_us
    for word in ("bucket", "DDP", "all_reduce", "FSDP"):
        assert word not in finding.advice
    assert analysis.pipelines == ()
    assert "pipeline" not in reported


def test_rounds_of_a_ring_cannot_be_merged(build):
    """Each sends what it received before; but a receive can be posted ahead."""
    program = programs.ring(1, ranks=3, steps=STEPS, late={}, link_us=dict.fromkeys(range(3), 200))
    _, analysis = _traced(build(3), program)
    finding = next(one for one in analysis.findings if one.kind == "communication")
    assert "merge" not in finding.advice
    assert "post irecv for the next message" in finding.advice
    assert finding.saves_us == pytest.approx(200, rel=0.05)


def test_what_merging_messages_saves_follows_from_the_latency(build):
    """Rank 0 sends eight small messages in a row, which rank 1 receives one by one."""
    program = [[], []]
    for step in range(STEPS):
        for number in range(8):
            key = f"{step}.{number}"
            program[0].append(programs.Op("send", key, us=100, peer=1))
            program[1].append(programs.Op("recv", key, us=100, peer=0))
        for rank, ops in enumerate(program):
            back = {"us": 0, "peer": 1 - rank}
            ops.append(programs.Op("work", "net", "compute", 500))
            ops.append(programs.Op("recv" if rank == 0 else "send", f"{step}.back", **back))
            ops.append(programs.Op("step"))
    # In both directions first, so that it is not a pipeline.
    program[1].insert(0, programs.Op("send", "first", us=1, peer=0))
    program[0].insert(0, programs.Op("recv", "first", us=1, peer=1))
    _, analysis = _traced(build(2), program)
    assert analysis.pipelines == ()
    (finding,) = [one for one in analysis.findings if one.kind == "communication"]
    assert finding.saves_us <= analysis.savings.transfer_us
    assert "merge messages" in finding.advice


def _bubbles(played, rank, peer, way):
    """Time blocked on each microbatch of a direction, mean per step after the first."""
    found = {}
    first = played.step_end[rank][0]
    for who, kind, start, end, op in played.rows:
        if (who, kind, op.peer, op.do) == (rank, "wait", peer, "recv") and start >= first:
            number = int(op.name.partition(":")[0].partition(way)[2])
            found[number] = found.get(number, 0) + end - start
    return [found[number] / (STEPS - 1) for number in sorted(found)]


@pytest.mark.parametrize("seed", range(4))
def test_bubbles_by_stage_and_microbatch(build, seed):
    print("seed", seed)
    chance = random.Random(seed)
    stages = [chance.randint(80, 300) for _ in range(chance.randint(2, 5))]
    count = chance.randint(1, 6)
    program = programs.pipeline(
        seed, stage_us=stages, steps=STEPS, microbatches=count, link_us={0: 50}
    )
    played, analysis = _traced(build(len(stages)), program)
    (pipeline,) = analysis.pipelines
    assert pipeline.ranks == tuple(range(len(stages)))
    assert pipeline.microbatches == count
    assert pipeline.ideal_share == pytest.approx((len(stages) - 1) / (count + len(stages) - 1))
    for stage in pipeline.stages:
        rank = stage.rank
        forward = _bubbles(played, rank, rank - 1, "f")
        backward = _bubbles(played, rank, rank + 1, "b")
        assert stage.forward_us == pytest.approx(forward)
        assert stage.backward_us == pytest.approx(backward)
        assert stage.bubble_us == pytest.approx(sum(forward) + sum(backward))
        assert stage.waiting_us + stage.transfer_us == pytest.approx(stage.bubble_us)
        assert stage.work_us + stage.bubble_us == pytest.approx(stage.step_us - 30)


def test_two_pipelines_side_by_side_are_two(build):
    one = programs.pipeline(1, stage_us=[100, 100], steps=STEPS, microbatches=2, link_us={})
    shifted = [
        [replace(op, peer=op.peer + 2, name=f"x{op.name}") if op.peer >= 0 else op for op in ops]
        for ops in one
    ]
    _, analysis = _traced(build(4), one + shifted)
    assert [pipeline.ranks for pipeline in analysis.pipelines] == [(0, 1), (2, 3)]


def test_few_microbatches_are_advised_to_become_more_and_it_pays_as_told(build):
    def program(count, us):
        return programs.pipeline(
            1,
            stage_us=[us] * 4,
            steps=STEPS,
            microbatches=count,
            link_us=dict.fromkeys(range(4), 0),
        )

    before, analysis = _traced(build(4), program(2, 1000))
    after = programs.run(program(4, 500))
    saved = (before.end() - before.end_of(0) - after.end() + after.end_of(0)) / (STEPS - 1)
    finding = next(one for one in analysis.findings if one.kind == "pipeline")
    assert "4 would halve" in finding.advice
    assert 0.98 * saved <= finding.saves_us <= 1.05 * saved


def test_all_reports_show_them(build, tmp_path):
    built = build(3)
    program = programs.pipeline(1, stage_us=[100] * 3, steps=STEPS, microbatches=4, link_us={})
    programs.write(built, programs.run(program))
    page, trace = tmp_path / "report.html", built.write()
    done = CliRunner().invoke(analyze, [str(trace), "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert [stage["rank"] for stage in value["pipelines"][0]["stages"]] == [0, 1, 2]
    assert "Pipeline bubbles" in page.read_text()
    text = CliRunner().invoke(analyze, [str(trace), "--full"]).stdout
    assert "Pipeline of 3 stages, 4 microbatches" in " ".join(text.split())


def test_a_send_waits_for_a_receive_that_is_recorded_late(build):
    """On a busy machine, a receive is posted before its recorded start."""
    built = build(2)
    for rank, (op, called, start, end) in enumerate([("send", 0, 1, 90), ("recv", 80, 120, 121)]):
        size = {"bytes": 8} if op == "send" else {"out_bytes": 8}
        built[rank].message(
            op, start, end, peer=1 - rank, tag=0, seq=0, enqueue_ns=called * 1000, **size
        )
    trace = built.trace()
    joined = join(trace, {rank: scan.messages for rank, scan in scan_ranks(trace).items()})
    assert joined.released.tolist() == [80_000, 120_000]
    assert joined.releaser.tolist() == [1, 1]


def test_a_wait_that_returns_at_once_holds_nobody_up(build):
    """The wait is the only record of a send's completion, which may be long before."""
    built = build(2)
    for step in range(4):
        begin = step * 10_100
        for rank in range(2):
            one = built[rank]
            one.step = step
            op, size = (("send", {"bytes": 8}), ("recv", {"out_bytes": 8}))[rank]
            waited = begin + (10_020 if rank == 0 else 30)
            sent = one.message(op, begin, waited, peer=1 - rank, tag=0, seq=step, **size)
            one.add("phase", begin + 30, begin + 10_000, name="forward", phase="forward")
            one.wait(waited - 20, waited, sent)
            one.whole_step(step, begin, begin + 10_100)
    analysis = built.trace().analyze()
    assert analysis.savings.compute_us == pytest.approx(9_970, abs=60)
