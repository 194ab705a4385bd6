"""What a strategy searches or calibrates is measured apart from what it found."""

from __future__ import annotations

import random

import pytest
from support.made_trace import trace_of

from ddltrace.analyzer.importers.imported import Row
from ddltrace.analyzer.open_trace import Trace
from ddltrace.analyzer.whatif.calibration import AT_ONCE
from ddltrace.experiments.calibration import _SHAPES, _EqualMessages, _sizes
from ddltrace.experiments.codecs.codec import shard_elements
from ddltrace.experiments.codecs.qsgd import Qsgd
from ddltrace.experiments.harness.measurement import calibration_of
from ddltrace.experiments.harness.results import Run, summarize
from ddltrace.experiments.harness.results_table import choice_lines
from ddltrace.experiments.harness.settings import Settings
from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.messages.trace_marks import CALIBRATION_BEGINS, CALIBRATION_ENDS
from ddltrace.experiments.strategy.spec import names, parse
from ddltrace.tracer.errors import TraceError, UsageError

SEED = random.SystemRandom().randrange(1 << 32)


def trace_of_events(events: dict[int, list[tuple[str, str, int | None, int]]]) -> Trace:
    """A trace of (kind, name, step, bytes) for each rank."""
    rows: dict[int, list[Row]] = {}
    for rank, own in events.items():
        rows[rank] = []
        for number, (kind, name, step, size) in enumerate(own):
            more = {"op": "all_reduce", "group": "0", "bytes": size} if kind == "message" else {}
            row = Row(1000 + number, 1001 + number, kind, name, "main", step=step, **more)
            rows[rank].append(row)
    return trace_of(rows)


def test_messages_and_steps_of_generated_calibrations_are_counted() -> None:
    rng = random.Random(SEED)
    for _ in range(50):
        ranks = range(rng.randrange(1, 4))
        last = rng.randrange(0, 30)
        sizes = {
            rank: [rng.randrange(1, 1 << 20) for _ in range(rng.randrange(1, 9))] for rank in ranks
        }
        found = calibration_of(
            trace_of_events(
                {
                    rank: [
                        ("marker", CALIBRATION_BEGINS, None, 0),
                        ("message", "bucket 1", 0, 1 << 30),
                        *(("message", "calibration: x", last, size) for size in sizes[rank]),
                        ("marker", CALIBRATION_ENDS, last, 0),
                        ("message", "bucket 2", last + 1, 1 << 30),
                    ]
                    for rank in ranks
                }
            )
        )
        assert found is not None
        assert found.steps == last + 1, SEED
        assert found.bytes == pytest.approx(sum(map(sum, sizes.values())) / len(ranks))
        assert found.messages == pytest.approx(sum(map(len, sizes.values())) / len(ranks))
        assert found.leave_out_of(range(0, 60)) == range(last + 1, 60)
        assert found.leave_out_of(range(40, 60)) == range(40, 60)
        with pytest.raises(TraceError, match="train more steps"):
            found.leave_out_of(range(0, last + 1))


def test_a_search_that_did_not_end_is_not_measured() -> None:
    begins = ("marker", CALIBRATION_BEGINS, None, 0)
    found = calibration_of(trace_of_events({0: [begins], 1: [begins]}))
    assert found is not None
    with pytest.raises(TraceError, match="searched or calibrated until the last step"):
        found.leave_out_of(range(10, 60))
    assert calibration_of(trace_of_events({0: [("message", "bucket", 0, 8)]})) is None


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("ddp", 0),
        ("bytescheduler", 0),
        ("bytescheduler:tune=true", 92),
        ("best_buckets", 38),
        ("best_buckets:steps=1", 14),
        ("mgwfbp", 7),
        ("accumulate:steps=4+mgwfbp:steps=2", 16),
        ("postlocalsgd:start=30,period=4", 30),
        ("powersgd:start=20+feedback", 20),
        ("dgc:warmup=12", 12),
        ("localsgd:period=5+powersgd:start=3+feedback", 15),
        ("odsgd:warmup=9", 9),
        ("unchanged", 0),
    ],
)
def test_opening_steps_are_not_measured(spec: str, steps: int) -> None:
    settings = Settings(strategies=["ddp", spec], ranks=2, steps=160, warmup=10)
    assert settings.measured_steps("ddp") == range(10, 160)
    first = settings.measured_steps(spec).start
    cycle = 1 if spec == "unchanged" else parse(spec).cycle_steps
    assert 10 + steps <= first < 10 + steps + cycle


def test_every_technique_that_searches_has_opening_steps() -> None:
    for name in set(names()) - {"feedback", "doublesqueeze"}:
        strategy = parse(name)
        schedule = strategy.schedule
        if schedule.search() is not None or schedule.timed_steps:
            assert strategy.opening_steps > 0, name


def test_steps_that_do_not_last_for_the_search_are_refused() -> None:
    with pytest.raises(UsageError, match="the 92 opening steps of bytescheduler:tune=true"):
        Settings(strategies=["ddp", "bytescheduler:tune=true"], ranks=2, steps=100, warmup=10)


def test_the_table_says_what_was_found_and_what_it_took() -> None:
    run = Run(
        strategy="best_buckets",
        choices={"found": {"schedule": "DdpBuckets", "bucket_mb": 4.0}},
        calibration={"steps": 38, "bytes": 2_500_000.0, "messages": 13.0},
    )
    text = "\n".join(choice_lines(summarize("best_buckets", [run])))
    assert "DdpBuckets(bucket_mb=4.0)" in text
    assert "first 38 steps" in text
    assert "13 messages of 2.500 MB" in text


def test_the_gradients_of_a_timed_message_have_different_lengths() -> None:
    for shape in _SHAPES:
        _, lengths, of_each = shape
        sizes = [rows * columns for rows, columns in _sizes(shape, 4)] * AT_ONCE
        gradients = [Gradient(index, f"{index}", size) for index, size in enumerate(sizes)]
        plan = _EqualMessages(AT_ONCE).plan(gradients[::-1])
        assert len(plan.messages) == AT_ONCE
        for message in plan.messages:
            parts = [gradients[each.gradient] for each in message.slices]
            # Also after a codec has rounded them up to shards of whole blocks.
            shards = {shard_elements(part.elements, 4, Qsgd().alignment) for part in parts}
            assert len(shards) == lengths
            assert len(parts) == lengths * of_each
