"""NCCL's events in the timeline of the dashboard."""

from __future__ import annotations

from pathlib import Path

from support.ring_writer import RingWriter

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.timeline.tracks import build_rank
from ddltrace.dashboard.workspace import OpenTrace


def ring(folder: Path) -> None:
    writer = RingWriter(0, 10)
    comm = writer.comm(7, 0, 2)
    coll = writer.coll(comm, 1000, 1010, 0, 1000)
    writer.add("kernel_ch", 1050, 1800, comm=comm, parent=coll, channel=3)
    writer.add("proxy_op", 1060, 1700, comm=comm, parent=coll, channel=3, peer=1, flags=1)
    writer.write(folder)


def test_every_channel_and_proxy_has_a_track(tmp_path: Path) -> None:
    ring(tmp_path)
    trace = open_trace(tmp_path)
    timeline = build_rank(trace, 0, trace.origin_ns)
    assert [(track.kind, track.label) for track in timeline.tracks] == [
        ("communication", "comm/0000000000000007"),
        ("device", "nccl/channel 3"),
        ("device", "nccl/send, channel 3"),
    ]


def test_a_click_shows_the_event(tmp_path: Path) -> None:
    ring(tmp_path)
    opened = OpenTrace(0, "rings", open_trace(tmp_path))
    names = {opened.event(0, number)["name"] for number in range(3)}
    assert names == {"all_reduce", "AllReduce", "send to 1"}
