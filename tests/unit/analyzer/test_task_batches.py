"""Small tasks go to Dask workers in batches; large ones and those of unknown size do not."""

from __future__ import annotations

import sys

from ddltrace.analyzer.engine.dask_engine import _batches


def batches(sizes: list[int] | None, count: int, workers: int = 2) -> list[list[int]]:
    """The batches of tasks 0, 1, 2, ..."""
    return [list(batch) for batch in _batches(range(count), sizes, workers)]


def test_small_tasks_share_batches_in_their_order():
    found = batches([360] * 2000, 2000)
    assert [task for batch in found for task in batch] == list(range(2000))
    assert {len(batch) for batch in found[:-1]} == {32}


def test_every_worker_gets_several_batches():
    assert len(batches([360] * 64, 64)) == 16
    assert len(batches([360] * 3, 3)) == 3
    assert batches([], 0) == []


def test_a_batch_reads_few_events():
    sizes = [20_000, 20_000, 20_000, 9_000_000, 1, 1]
    found = [list(batch) for batch in _batches(range(600), sizes * 100, 1)]
    assert found[:3] == [[0, 1], [2], [3]]
    assert all(sum((sizes * 100)[task] for task in batch) <= 50_000 for batch in found if batch[1:])


def test_tasks_without_a_size_are_sent_alone():
    assert batches(None, 100) == [[task] for task in range(100)]


def test_the_size_of_a_trace_that_is_still_written_is_not_known(build):
    job = build(2)
    for rank in (0, 1):
        job[rank].whole_step(0, 0, 10)
    trace = job.trace()
    assert trace.size == 2
    assert trace.of_rank(1).size == 1
    trace.run.ranks[0].events = None
    assert trace.size == sys.maxsize
