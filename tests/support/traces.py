"""Reads what a traced job left, rank by rank and section by section."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.run_reader import read_run

SAME_OF_MESSAGES = [
    *("op", "name", "seq", "peer", "tag", "bytes", "out_bytes", "dtype", "status", "tensors"),
    *("step", "phase", "group", "lane", "split_bytes"),
]
"""What two recordings of a job agree on: all but times and numbers of their own."""


def read_last_rows(trace: Path, segment: str) -> tuple[pa.Table, int]:
    """Reads a rank's events, of each message only the last row.

    A message that was under way when a batch was written has a row before its final one.
    """
    table, lost = read_events(trace, segment)
    return drop_superseded(table), lost


def last_of_messages(events: pd.DataFrame) -> pd.DataFrame:
    """Of each message its last row, with parameters and words that can be compared."""
    messages = events[events.kind == "message"].drop_duplicates("id", keep="last")
    tensors = [None if ids is None else tuple(ids) for ids in messages.tensors]
    # The words of a category are those of all events, whatever else the job did.
    words = messages.select_dtypes("category").astype(object)
    return messages.assign(tensors=tensors, **words)


class Recorded:
    """The trace of a job whose sections are markers.

    Attributes:
        ranks: What each rank says of itself, by rank.
        frames: Each rank's events, of each message only the last row.
    """

    def __init__(self, trace: Path) -> None:
        self.info = read_run(trace)
        self.ranks: dict[int, RankInfo] = {}
        self.frames: dict[int, pd.DataFrame] = {}
        for rank in self.info.ranks:
            table, lost = read_events(trace, rank.segment)
            assert lost == 0
            frame = table.to_pandas().astype({"name": object})
            messages = frame[frame.kind == "message"].drop_duplicates("id", keep="last")
            self.ranks[rank.rank] = rank
            self.frames[rank.rank] = pd.concat([frame[frame.kind != "message"], messages])

    def section(self, rank: int, name: str, kind: str) -> pd.DataFrame:
        """The events of a kind that began inside a marker, in order."""
        frame = self.frames[rank]
        marker = frame[(frame.kind == "marker") & (frame.name == name)]
        assert len(marker) == 1, name
        start, end = marker.start_ns.iloc[0], marker.end_ns.iloc[0]
        inside = (frame.kind == kind) & (frame.start_ns >= start) & (frame.start_ns < end)
        return frame[inside].sort_values("id" if kind == "message" else "start_ns")

    def messages(self, rank: int, name: str) -> pd.DataFrame:
        """The messages of a section, in the order of their launch."""
        return self.section(rank, name, "message")

    def tensor_names(self, rank: int) -> dict[int, str]:
        """Name of each parameter by its id."""
        return {tensor.id: tensor.name for tensor in self.ranks[rank].tensors}

    def carried(self, rank: int, messages: pd.DataFrame) -> list[str]:
        """Names of the parameters in some messages, sorted."""
        names = self.tensor_names(rank)
        return sorted(names[t] for ids in messages.tensors.dropna() for t in ids)
