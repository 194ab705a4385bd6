"""Tracks one rank process of a running job in bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, Columns
from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.analyzer.live.live_goodput import ProcessTime
from ddltrace.analyzer.live.stream_tail import StreamTail
from ddltrace.tracer.trace.schema import EVENTS

if TYPE_CHECKING:
    from pathlib import Path

    from ddltrace.tracer.trace.run_info import RankInfo

WINDOW_NS: Final = 15_000_000_000
"""Events that ended longer ago than this, by the newest event of the rank, are forgotten."""

_MAX_STEPS: Final = 600
_MAX_OPEN: Final = 4096


@dataclass(frozen=True)
class OpenMessage:
    """A message that has not completed.

    Attributes:
        op: Its operation.
        group: Name of its process group.
        seq: Its number in the group; None if unknown.
        peer: The other side of a send or receive; None for a collective.
        start_ns: When it began, on the process's clock.
        step: The step in which it was launched; None outside all steps.
    """

    op: str
    group: str
    seq: int | None
    peer: int | None
    start_ns: int
    step: int | None


class LiveRank:
    """Follows one rank process.

    Args:
        info: The process's own record, as it is at first; `info` is replaced by newer ones.
        path: Its stream.
        max_rows: Events to keep at most.

    Attributes:
        info: The newest record of the process.
        steps: Step -> its start and end in ns, of the last steps, on the process's clock.
        open: Messages that have not completed, by their id.
        entered: Group -> the highest number of a collective that the rank has entered.
        num_steps: How many steps the process has completed.
        last_ns: The latest time of any event; None before the first.
        time: What its time went to.
    """

    def __init__(self, info: RankInfo, path: Path, max_rows: int) -> None:
        self.info = info
        self.steps: dict[int, tuple[int, int]] = {}
        self.open: dict[int, OpenMessage] = {}
        self.entered: dict[str, int] = {}
        self.num_steps = 0
        self.last_ns: int | None = None
        began_ns = info.clock.get("monotonic_ns")
        self.time = ProcessTime(began_ns if isinstance(began_ns, int) else 0)
        self._max_rows = max_rows
        self._tail = StreamTail(path, EVENTS, EVENTS_READ)
        self._window: deque[tuple[int, int, pa.RecordBatch]] = deque()
        self._rows = 0

    def read(self) -> bool:
        """Reads what the process has written since the previous call.

        Returns:
            Whether there was anything.

        Raises:
            TraceError: The stream is damaged.
        """
        found = False
        for batch in self._tail.batches():
            found = True
            self._add(batch)
        return found

    def close(self) -> None:
        """Closes the stream."""
        self._tail.close()

    @property
    def longest_ns(self) -> int:
        """The longest message that completed within the window; 0 without any."""
        return max((longest for _, longest, _ in self._window), default=0)

    def batches(self) -> list[pa.RecordBatch]:
        """The events of the window, as they were read."""
        return [batch for _, _, batch in self._window]

    def window(self) -> Columns:
        """The events of the window, of each message the last row."""
        if not self._window:
            return Columns(EVENTS.empty_table())
        table = pa.Table.from_batches(self.batches())
        return Columns(drop_superseded(complete(table.unify_dictionaries())))

    def _add(self, batch: pa.RecordBatch) -> None:
        columns = Columns(complete(pa.Table.from_batches([batch])))
        if not len(columns):
            return
        last_ns = int(max(columns.start.max(), columns.end.max()))
        self.last_ns = last_ns if self.last_ns is None else max(self.last_ns, last_ns)
        self._add_steps(columns)
        self.time.add(columns)
        self._window.append((last_ns, self._add_messages(columns), batch))
        self._rows += len(columns)
        while len(self._window) > 1 and (
            self._rows > self._max_rows or self._window[0][0] < self.last_ns - WINDOW_NS
        ):
            self._rows -= self._window.popleft()[2].num_rows

    def _add_steps(self, columns: Columns) -> None:
        rows = columns.rows("step")
        rows = rows[columns.end[rows] != NULL_NS]
        self.num_steps += len(rows)
        for step, start, end in zip(
            columns.step[rows].tolist(),
            columns.start[rows].tolist(),
            columns.end[rows].tolist(),
            strict=True,
        ):
            self.steps[step] = start, end
        for step in list(self.steps)[: max(0, len(self.steps) - _MAX_STEPS)]:
            del self.steps[step]

    def _add_messages(self, columns: Columns) -> int:
        """Follows messages in flight; returns the longest duration of one that completed."""
        rows = columns.rows("message")
        if not len(rows):
            return 0
        ids, seqs = columns.ints("id", rows), columns.ints("seq", rows)
        peers = columns.ints("peer", rows)
        groups, group_names = columns.codes("group", rows)
        ops, op_names = columns.codes("op", rows)
        in_flight = columns.unfinished[rows]
        for code, name in enumerate(group_names):
            mine = (groups == code) & (seqs != NULL)
            if mine.any():
                self.entered[name] = max(self.entered.get(name, NULL), int(seqs[mine].max()))
        steps = columns.step[rows]
        for i in np.flatnonzero(in_flight).tolist():
            if len(self.open) < _MAX_OPEN:
                p2p = op_names[ops[i]] in ("send", "recv")
                self.open[int(ids[i])] = OpenMessage(
                    op=op_names[ops[i]],
                    group=group_names[groups[i]] if groups[i] != NULL else "",
                    seq=None if seqs[i] == NULL else int(seqs[i]),
                    peer=int(peers[i]) if p2p and peers[i] != NULL else None,
                    start_ns=int(columns.start[rows[i]]),
                    step=None if steps[i] == NULL else int(steps[i]),
                )
        # A message can be seen in flight and completed in the same batch.
        if self.open:
            for number in set(ids[~in_flight].tolist()) & self.open.keys():
                del self.open[number]
        timed = rows[columns.end[rows] != NULL_NS]
        return int((columns.end[timed] - columns.start[timed]).max(initial=0))


EVENTS_READ: Final = (
    *("start_ns", "end_ns", "kind", "name", "lane", "step", "phase", "id", "parent", "op"),
    *("group", "seq", "peer", "tag", "bytes", "out_bytes", "wire_bytes", "enqueue_ns", "status"),
    *("samples", "tokens", "flops"),
)
"""The columns that are read; lists of tensors and shapes are left out."""


def complete(table: pa.Table) -> pa.Table:
    """Adds the columns that are not read, as nulls, so that the measures accept the table."""
    arrays = [
        table[field.name] if field.name in EVENTS_READ else pa.nulls(len(table), field.type)
        for field in EVENTS
    ]
    return pa.Table.from_arrays(arrays, schema=EVENTS)
