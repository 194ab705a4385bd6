"""Grouping by stream takes one sort, however many streams there are."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ddltrace.analyzer.events.event_columns import distinct, places_by_value
from ddltrace.analyzer.measures.device_queues import queue_lengths


def seconds_for(streams: int) -> float:
    """Processor time of the queues of one launch and one kernel on each of so many streams."""
    number = np.arange(streams)
    begin = time.process_time()
    found = sum(1 for _ in queue_lengths(4 * number, 4 * number + 2, number))
    used = time.process_time() - begin
    assert found == streams
    return used


def test_the_queues_of_streams_take_time_in_proportion() -> None:
    seconds_for(4096)
    few, many = (min(seconds_for(streams) for _ in range(2)) for streams in (1 << 14, 1 << 18))
    # 16 times the streams; one pass over all events for each stream took 256 times as long.
    assert many < 64 * few


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_places_by_value_are_those_of_each_value(most: int) -> None:
    for size in (0, 1, 500):
        values = np.random.default_rng(size).integers(-most, most, size)
        found = list(places_by_value(values))
        assert [value for value, _ in found] == distinct(values).tolist()
        for value, places in found:
            assert places.tolist() == np.flatnonzero(values == value).tolist()


def test_the_queue_of_each_stream_counts_its_own_works() -> None:
    generator = np.random.default_rng(5)
    launched = generator.permutation(400)
    stream = generator.integers(0, 7, 400)
    start = launched + generator.integers(1, 50, 400) * 1000
    found = dict(queue_lengths(launched, start, stream))
    assert sorted(found) == list(range(7))
    for number, (times, lengths) in found.items():
        mine = stream == number
        assert len(times) == 2 * mine.sum()
        assert lengths[-1] == 0
        assert lengths.tolist() == [
            int((launched[mine] <= at).sum() - (start[mine] <= at).sum()) for at in times
        ]
