"""What the messages of a trace say about the offsets of clocks.

No rank leaves a collective before the last one has entered it, no receive ends before its send
began, no rank has a broadcast before its root, no root a reduction before its contributors.
Each of these bounds the offset between two clocks from one side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.clock_fit import Bounds, IntArray
from ddltrace.tracer.store import RankInfo

if TYPE_CHECKING:
    import pandas as pd

EventReader = Callable[[RankInfo], Iterable[pa.Table]]
"""Gives a process's events, on its own clock, some at a time."""

_FROM_ALL_TO_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Each rank's result needs every rank's part. (In an all_to_all a part may be empty.)"""
_FROM_ROOT: Final = ("broadcast", "scatter")
_TO_ROOT: Final = ("reduce", "gather")

_KEY: Final = ["generation", "members", "group", "op", "seq", "source", "destination", "tag"]
_MAX_SEGMENTS: Final = 16
"""Processes of one clock that are read: they all say the same of it."""

_MAX_BOUNDS: Final = 2048
"""Bounds of one side that are kept: the tightest of each stretch of time."""

_DEVICE_SLACK_NS: Final = 50_000
"""Ends seen on a device are brought onto the host's clock with an error of their own."""


@dataclass(frozen=True)
class MessageTimes:
    """What the processes of one clock say of their messages with others.

    Attributes:
        starts: Per message, when the last of them entered it.
        ends: Per message, when the first of them left it.
    """

    starts: pd.DataFrame
    ends: pd.DataFrame


def message_times(
    infos: Sequence[RankInfo], read: EventReader, generations: Mapping[str, int]
) -> MessageTimes | None:
    """Gathers the messages of the processes of one clock.

    Args:
        infos: The processes.
        read: Gives a process's events, on its own clock.
        generations: Segment name -> which life of the job the process belongs to: numbers of
            messages begin anew in each.

    Returns:
        Their messages; None if there are none.
    """
    import pandas as pd

    frames = [
        _messages(info, events, generations.get(info.segment, info.attempt))
        for info in infos[:_MAX_SEGMENTS]
        for events in read(info)
    ]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        return None
    rows = pd.concat(frames, ignore_index=True)
    starts = rows[rows["gives"]].groupby(_KEY, as_index=False, sort=False)["start"].max()
    ends = rows[rows["takes"]].groupby(_KEY, as_index=False, sort=False)["end"].min()
    return MessageTimes(
        starts.rename(columns={"start": "time"}), ends.rename(columns={"end": "time"})
    )


def message_bounds(here: MessageTimes, there: MessageTimes) -> Bounds | None:
    """Bounds on the offset of one clock to another from the messages between them.

    Args:
        here: Messages of processes on the one clock.
        there: Messages of processes on the other.

    Returns:
        Bounds on what must be added to the one clock to give the other; None if no message
        went between them both ways.
    """
    low = here.ends.merge(there.starts, on=_KEY, suffixes=("", "_other"))
    high = here.starts.merge(there.ends, on=_KEY, suffixes=("", "_other"))
    if low.empty or high.empty:
        return None
    lows = (low["time_other"] - low["time"]).to_numpy(np.int64)
    highs = (high["time_other"] - high["time"]).to_numpy(np.int64)
    base = int(np.median(highs))
    return Bounds.joined(
        [
            _one_side(low["time"].to_numpy(np.int64), lows - base, base, lower=True),
            _one_side(high["time"].to_numpy(np.int64), highs - base, base, lower=False),
        ]
    )


def _one_side(x: IntArray, value: IntArray, base: int, *, lower: bool) -> Bounds:
    edges = np.linspace(x.min(), x.max(), _MAX_BOUNDS)
    stretch = np.searchsorted(edges, x)
    order = np.lexsort((-value if lower else value, stretch))
    rows = order[np.unique(stretch[order], return_index=True)[1]]
    known = value[rows].astype(np.float64)
    none = np.full(len(rows), -np.inf if not lower else np.inf)
    low, high = (known, none) if lower else (none, known)
    return Bounds(x[rows], low, high, base)


def _messages(info: RankInfo, events: pa.Table, generation: int) -> pd.DataFrame:
    """The completed messages among a process's events, and whether each gives or takes."""
    import pandas as pd

    wanted = pc.and_(
        pc.equal(events["kind"], "message"),
        pc.and_(pc.is_valid(events["seq"]), pc.is_valid(events["end_ns"])),
    )
    columns = ["end_ns", "op", "group", "seq", "peer", "tag", "bytes", "out_bytes"]
    complete = pc.equal(events["status"], "ok").fill_null(False)
    events = events.filter(pc.and_(wanted.fill_null(False), complete))
    # The start before the frame: a column with nulls would become one of floats.
    start = pc.min_element_wise(events["start_ns"], events["enqueue_ns"])
    frame = events.select(columns).append_column("start", start).to_pandas()
    members = {group.name: str(group.ranks) for group in info.groups}
    op = frame["op"].astype(str)
    peer = frame["peer"].fillna(-1).astype(np.int64)
    is_root = peer == info.rank
    # Without a byte to carry, a library may return at once.
    carries = (frame["bytes"].fillna(0) > 0) | (frame["out_bytes"].fillna(0) > 0)
    everyone = op.isin(_FROM_ALL_TO_ALL) & (carries | (op == "barrier"))
    rooted = op.isin([*_FROM_ROOT, *_TO_ROOT]) & (peer >= 0) & carries
    send, receive = (op == "send") & (peer >= 0), (op == "recv") & (peer >= 0)
    gives = everyone | send | (rooted & (is_root == op.isin(_FROM_ROOT)))
    takes = everyone | receive | (rooted & (is_root != op.isin(_FROM_ROOT)))
    p2p = send | receive
    slack = _DEVICE_SLACK_NS if info.device != "cpu" else 0
    rows = pd.DataFrame(
        {
            "generation": generation,
            "group": frame["group"].astype(str),
            "members": [members.get(name, "") for name in frame["group"].astype(str)],
            "op": op.where(~p2p, "p2p"),
            "seq": frame["seq"].astype(np.int64),
            "source": np.where(p2p, np.where(send, info.rank, peer), -1),
            "destination": np.where(p2p, np.where(send, peer, info.rank), -1),
            "tag": np.where(p2p, frame["tag"].fillna(0), 0).astype(np.int64),
            "start": frame["start"].astype(np.int64),
            "end": frame["end_ns"].astype(np.int64) + slack,
            "gives": gives,
            "takes": takes,
        }
    )
    used: pd.DataFrame = rows.loc[gives | takes]
    return used
