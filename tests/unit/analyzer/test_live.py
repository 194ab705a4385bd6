"""Following a job: each batch is read once, and lateness is what was put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.events.rank_messages import read_messages
from ddltrace.analyzer.live.live_rank import WINDOW_NS, LiveRank
from ddltrace.analyzer.live.live_state import Alert, ProcessSigns, find_alerts
from ddltrace.analyzer.live.live_trace import lateness
from ddltrace.analyzer.live.stream_tail import StreamTail
from ddltrace.analyzer.trace.align import RankClock
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import segment_name

SECOND = 1_000_000_000
COLUMNS = ("start_ns", "kind", "name")


def rows(*values: dict[str, object]) -> pa.RecordBatch:
    """Events; columns that are not given are null."""
    columns = [[row.get(name) for row in values] for name in EVENTS.names]
    arrays = [
        pa.array(column, pa.string()).dictionary_encode().cast(field.type)
        if pa.types.is_dictionary(field.type)
        else pa.array(column, field.type)
        for column, field in zip(columns, EVENTS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def step(number: int, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "kind": "step",
        "name": f"step {number}",
        "start_ns": start_ns,
        "end_ns": end_ns,
        "step": number,
    }


def message(seq: int, start_ns: int, end_ns: int | None) -> dict[str, object]:
    return {
        "kind": "message",
        "op": "all_reduce",
        "group": "0",
        "id": seq,
        "seq": seq,
        "start_ns": start_ns,
        "enqueue_ns": start_ns,
        "end_ns": end_ns,
        "status": "open" if end_ns is None else "ok",
    }


def test_a_stream_that_grows_gives_each_batch_once(tmp_path: Path) -> None:
    whole, growing = tmp_path / "whole.arrows", tmp_path / "growing.arrows"
    stream = StreamWriter(whole)
    written = [rows(*(step(n, n, n + 1) for n in range(k * k, (k + 1) ** 2))) for k in range(1, 9)]
    for batch in written:
        stream.write(batch)
    stream.close()
    content = whole.read_bytes()
    growing.write_bytes(b"")
    tail = StreamTail(growing, EVENTS, COLUMNS)
    found, most = [], 0
    with growing.open("ab", buffering=0) as file:
        for start in range(0, len(content), 131):
            file.write(content[start : start + 131])
            new = list(tail.batches())
            found += new
            most = max(most, len(new))
    tail.close()
    assert most == 1
    assert [batch.to_pylist() for batch in found] == [
        batch.select(COLUMNS).to_pylist() for batch in written
    ]


def test_a_damaged_stream_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "stream.arrows"
    stream = StreamWriter(path)
    stream.write(rows(step(0, 0, 1)))
    stream.close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"ddltrace.trace/1", b"ddltrace.trace/9"))
    with pytest.raises(TraceError, match="schema"):
        list(StreamTail(path, EVENTS, COLUMNS).batches())


def test_a_window_is_bounded_and_steps_are_counted(tmp_path: Path) -> None:
    segment = segment_name(rank=0, attempt=0, pid=7)
    path = tmp_path / f"{segment}.arrows"
    stream = StreamWriter(path)
    rank = LiveRank(RankInfo(rank=0, segment=segment), path, max_rows=1000)
    for second in range(60):
        first = second * 10
        stream.write(
            rows(
                *(
                    step(n, n * SECOND // 10, (n + 1) * SECOND // 10)
                    for n in range(first, first + 10)
                ),
                message(second, second * SECOND, None),
            )
        )
        assert rank.read()
        assert not rank.read()
        assert rank.open.keys() == {second}
        stream.write(rows(message(second, second * SECOND, second * SECOND + 5_000_000)))
        rank.read()
        assert not rank.open
    window = rank.window()
    assert rank.num_steps == 600
    assert rank.entered == {"0": 59}
    assert rank.longest_ns == 5_000_000
    assert 60 * SECOND - int(window.start.min()) <= WINDOW_NS + 2 * SECOND
    assert not window.unfinished.any()
    rank.close()


@pytest.mark.parametrize(
    ("longest_s", "hangs_after_s"), [(0.1, 1.5), (0.5, 2.5), (1.0, 3.5), (2.0, 3.5), (4.0, 6.0)]
)
def test_a_hang_is_reported_within_seconds_where_messages_are_not_longer(
    tmp_path: Path, longest_s: float, hangs_after_s: float
) -> None:
    ranks = []
    for number in (0, 1):
        segment = segment_name(rank=number, attempt=0, pid=7 + number)
        stream = StreamWriter(tmp_path / f"{segment}.arrows")
        stream.write(rows(message(0, 0, round(longest_s * SECOND))))
        if number == 0:
            stream.write(rows(message(1, 5 * SECOND, None)))
        info = RankInfo(rank=number, segment=segment, status="running")
        ranks.append(LiveRank(info, tmp_path / f"{segment}.arrows", max_rows=1000))
        ranks[-1].read()

    def alerts(after_s: float) -> tuple[Alert, ...]:
        now_ns = round((5 + after_s) * SECOND)
        signs = ProcessSigns({}, {}, {rank.info.segment: now_ns for rank in ranks})
        return find_alerts(ranks, signs, running=True)

    assert alerts(hangs_after_s - 0.1) == ()
    (alert,) = alerts(hangs_after_s + 0.1)
    assert (alert.kind, alert.ranks) == ("hang", (1,))
    for rank in ranks:
        rank.close()


def test_lateness_is_the_share_and_time_that_was_put_in() -> None:
    """Rank 2 is 3 ms late to seven of ten collectives, rank 0 1 ms late to the others."""
    messages = []
    for place in range(3):
        late = [3_000_000 if place == 2 and n < 7 else 0 for n in range(10)]
        late = [1_000_000 if place == 0 and n >= 7 else late[n] for n in range(10)]
        batch = rows(*(message(n, n * SECOND + late[n], (n + 1) * SECOND) for n in range(10)))
        messages.append(read_messages(Columns(pa.Table.from_batches([batch]))))
    found = lateness(messages, [RankClock(place) for place in range(3)])
    assert found == {0: (0.3, 1000.0), 1: (0.0, 0.0), 2: (0.7, 3000.0)}
    assert lateness([], []) == {}
    assert np.isclose(sum(share for share, _ in found.values()), 1)
