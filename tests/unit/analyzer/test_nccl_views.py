"""NCCL's events in the report and in exported files."""

from __future__ import annotations

import json
from pathlib import Path

from support.ring_writer import RingWriter

from ddltrace.analyzer.analysis import analyze, analyze_in_full
from ddltrace.analyzer.exporters import export
from ddltrace.analyzer.joined.nccl_events import nccl_rows
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.html_report import render
from ddltrace.analyzer.report.text_report import render_report


def ring(folder: Path, rank: int = 0, func: str = "AllReduce") -> None:
    writer = RingWriter(rank, 10 + rank)
    comm = writer.comm(7, rank, 2)
    for seq in range(2):
        at = 1000 * (seq + 1)
        coll = writer.coll(comm, at, at + 10, seq, 1000, func=func)
        writer.add(
            "kernel_ch",
            at + 50,
            at + 800,
            comm=comm,
            parent=coll,
            channel=3,
            sequence=50,
            value=800,
        )
        op = writer.add(
            "proxy_op", at + 60, at + 700, comm=comm, parent=coll, channel=3, peer=1 - rank, flags=1
        )
        writer.add(
            "proxy_step", at + 70, at + 600, parent=op, steps=4, value=4000,
            states=(at + 70, at + 80, at + 100),
        )  # fmt: skip
    writer.write(folder)


def test_every_channel_and_proxy_has_a_lane(tmp_path: Path) -> None:
    ring(tmp_path)
    rows = nccl_rows(open_trace(tmp_path), 0).to_pylist()
    # The first message begins at 1050, with its kernel; its launch is earlier.
    assert [(row["lane"], row["name"], row["start_ns"]) for row in rows][:4] == [
        ("nccl/channel 3", "AllReduce", 1050),
        ("nccl/send, channel 3", "send to 1", 1060),
        ("nccl/send, channel 3", "step 4", 1070),
        ("nccl/host", "AllReduce", 2000),
    ]
    assert rows[4]["name"] == "AllReduce"


def test_exported_files_have_the_lanes(tmp_path: Path) -> None:
    ring(tmp_path)
    path = tmp_path / "out.json"
    export(open_trace(tmp_path), "chrome", path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = [event for event in events if event["name"] == "step 4"]
    assert [threads[event["tid"]] for event in steps] == ["nccl/send, channel 3"] * 2
    assert [event["dur"] for event in steps] == [0.53, 0.53]
    assert export(open_trace(tmp_path), "perfetto", tmp_path / "out.pftrace") == 9


def test_report_has_a_section(tmp_path: Path) -> None:
    for rank in range(2):
        ring(tmp_path, rank)
    text = render_report(analyze(open_trace(tmp_path)))
    section = text[text.index("NCCL's own events (16)") :].split("\n\n")[0]
    assert "AllReduce (2)      2  4.00 kB  RING/SIMPLE x1  750 ns     0 ns    750 ns" in section
    assert "0 to 1" in section
    assert "16.0 kB within hosts, 0 B between hosts" in section
    assert all(len(line) <= 100 for line in text.splitlines())


def test_html_report_has_the_tables(tmp_path: Path) -> None:
    for rank in range(2):
        ring(tmp_path, rank, func="<b>Reduce")
    trace = open_trace(tmp_path)
    page = render(analyze_in_full(trace), trace)
    assert 'id="nccl-collectives"' in page
    assert "&lt;b&gt;Reduce" in page
    assert "<b>Reduce" not in page
    assert "2 links of proxies" in page


def test_names_of_strangers_are_not_printed_raw(tmp_path: Path) -> None:
    ring(tmp_path, func="\u202eecuder")
    text = render_report(analyze(open_trace(tmp_path)))
    assert "\u202e" not in text
