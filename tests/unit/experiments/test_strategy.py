"""Specs of strategies."""

from __future__ import annotations

import pytest

from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.schedules.bytescheduler import ByteScheduler
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.wait_free import WaitFree
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.spec import BASELINE, exchange_of, parse
from ddltrace.experiments.technique import AXES
from ddltrace.tracer.errors import UsageError


@pytest.mark.parametrize(
    ("spec", "canonical", "schedule"),
    [
        ("wfbp", "wfbp", WaitFree()),
        (" ddp ", "ddp", DdpBuckets()),
        ("ddp:bucket_mb=25.0", "ddp:bucket_mb=25", DdpBuckets(25.0)),
        ("wfbp:wait=layer", "wfbp:wait=layer", WaitFree("layer")),
        ("ddp: bucket_mb = 0.125", "ddp:bucket_mb=0.125", DdpBuckets(0.125)),
        ("bytescheduler:credit_mb=1e20", "bytescheduler:credit_mb=1e20", ByteScheduler(1.0, 1e20)),
    ],
)
def test_parse(spec: str, canonical: str, schedule: object) -> None:
    strategy = parse(spec)
    assert (strategy.spec, strategy.schedule) == (canonical, schedule)
    assert parse(strategy.spec) == strategy


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "there are: .*fifo, wfbp, ddp"),
        ("p9", "no 'p9'"),
        ("ddp:cap=3", "bucket_mb="),
        ("fifo:x=1", "it has: none"),
        ("ddp:bucket_mb", "not a parameter"),
        ("ddp:bucket_mb=big", "must be float"),
        ("wfbp:wait=never", "must be update or layer"),
        ("ddp:bucket_mb=0", "positive"),
        ("ddp:bucket_mb=nan", "positive"),
        ("ddp:bucket_mb=inf", "positive"),
        ("fifo+wfbp", "two techniques on the order axis"),
        ("every-step", "no 'every-step'"),
        ("topk:density=0.1,density=0.2", "density of topk is given twice"),
        ("sparseloco:period=10", "is a preset .* diloco:period=30"),
        ("topk+", "a name is missing"),
        ("wfbp:wait=next_update", "must be update or layer"),
        ("ddp:bucket_mb=1e305", "positive number up to"),
        ("expert:capacity=0", "capacity must be more than 0 and at most 1024"),
        ("expert:capacity=nan", "capacity must be more than 0"),
        ("expert:capacity=2000", "capacity must be more than 0"),
        ("expert:exchange=ring", "must be direct or hierarchical"),
        ("expert:ranks_per_host=2", "ranks_per_host needs exchange=hierarchical"),
        ("expert:exchange=hierarchical,ranks_per_host=0", "must be at least 1"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(spec: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse(spec)


def test_a_partition_larger_than_any_number_of_bytes_keeps_tensors_whole() -> None:
    plan = parse("bytescheduler:partition_mb=1e305").schedule.plan([Gradient(0, "weight", 10)])
    assert [message.elements for message in plan.messages] == [10]


@pytest.mark.parametrize("other", ["fp16", "accumulate:steps=2", "localsgd:period=2", "lars"])
def test_one_step_delay_stands_alone(other: str) -> None:
    with pytest.raises(UsageError):
        parse(f"odsgd+{other}")


def test_the_catalogue_is_consistent() -> None:
    assert {entry.axis for entry in techniques()} == set(AXES)
    chosen = [entry for entry in techniques() if entry.build is not None]
    names = [entry.name for entry in chosen]
    assert len(names) == len(set(names))
    assert BASELINE in names
    for entry in chosen:
        if entry.modifier != "required":
            assert parse(entry.name).spec == entry.name


@pytest.mark.parametrize(
    ("spec", "exchange"),
    [
        ("ddp:bucket_mb=1", "ddp"),
        ("p3:slice=1000", "ddp"),
        ("wfbp+topk:density=0.01+feedback", "topk:density=0.01+feedback"),
        ("localsgd:period=4+int8", "int8"),
        ("bf16+ring", "bf16+ring"),
    ],
)
def test_what_exchanges_the_messages_of_a_strategy(spec: str, exchange: str) -> None:
    assert exchange_of(spec) == exchange
