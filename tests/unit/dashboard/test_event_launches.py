"""From a kernel to the call that launched it, and back."""

import pytest
from unit.dashboard.conftest import BASE, MS, event
from unit.dashboard.test_details import find, texts

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.pages.event_details import describe
from ddltrace.dashboard.pages.timeline_page import event_panel
from ddltrace.dashboard.workspace import Workspace


def with_device(rank, rows):
    """Calls at 41 ms (a message of rank 0, see `rank_events`), 32, 33 and 34 ms, and their work."""
    for row in rows:
        if row["kind"] == "message" and row["seq"] == 0 and row["op"] == "all_reduce":
            row["enqueue_ns"] = BASE + 31 * MS
    for at, name in (
        (31, "cudaLaunchKernelExC"),
        (32, "cudaGraphLaunch"),
        (34, "cudaLaunchKernel"),
    ):
        rows.append(event(at * MS, at * MS + 9000, "host", name=name))
    # Two calls of two threads at once: the work tells which is whose.
    rows.append(event(33 * MS, 33 * MS + 900, "host", name="cudaLaunchKernel", lane="thread-2"))
    rows.append(event(33 * MS, 33 * MS + 900, "host", name="cudaMemcpyAsync", lane="thread-3"))
    for at, launched, kind, name in (
        (36, 32, "kernel", "first"),
        (37, 32, "kernel", "second"),
        (38, 33, "copy", "Memcpy HtoD"),
        (39, 33, "kernel", "gemm"),
        (40, 35, "kernel", "alone"),
    ):
        rows.append(
            event(
                at * MS,
                (at + 1) * MS,
                kind,
                name=name,
                lane="stream-7",
                enqueue_ns=BASE + launched * MS,
            )
        )
    return rows


@pytest.fixture
def launched(write_run_of):
    return Workspace([open_trace(write_run_of("device", change=with_device))]).get(0)


def call_of(opened, rank, **wanted):
    launch = describe(opened, rank, find(opened, rank, **wanted)).launch
    return None if launch is None else (launch.title, [work.title for work in launch.works])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_and_what_it_launched_are_found_from_either(launched, rank):
    graph = ("cudaGraphLaunch", ["first", "second"])
    for name in ("cudaGraphLaunch", "first", "second"):
        assert call_of(launched, rank, name=name) == graph
    copy, kernel = ("cudaMemcpyAsync", ["Memcpy HtoD"]), ("cudaLaunchKernel", ["gemm"])
    assert call_of(launched, rank, kind="copy") == copy
    assert call_of(launched, rank, name="gemm") == kernel
    assert call_of(launched, rank, lane="thread-2") == kernel
    assert call_of(launched, rank, lane="thread-3") == copy


def test_what_lacks_its_call_or_its_work_has_no_launch(launched):
    assert call_of(launched, 0, name="alone") is None  # no call at 35 ms
    at_34 = find(launched, 0, name="cudaLaunchKernel", lane="main")
    assert describe(launched, 0, at_34).launch is None
    assert call_of(launched, 0, kind="layer") is None


def test_arrows_lead_from_the_call_to_its_work_and_to_the_other_ranks(launched):
    kernel = find(launched, 1, name="second")
    children, flow = event_panel(launched, 1, kernel)
    graph = find(launched, 1, name="cudaGraphLaunch")
    assert [(part["event"], part.get("call"), part.get("launched")) for part in flow] == [
        (kernel, None, True),
        (graph, True, None),
    ]
    assert "5.00 ms before: cudaGraphLaunch" in texts(children)
    children, flow = event_panel(launched, 1, graph)
    assert [part.get("launched") for part in flow] == [None, True, True]
    assert "4.00 ms later: first" in texts(children)
    # A call that launched a message leads to its parts on all ranks.
    for wanted in ({"name": "cudaLaunchKernelExC"}, {"op": "all_reduce", "seq": 0}):
        _, flow = event_panel(launched, 0, find(launched, 0, **wanted))
        marks = [(part["rank"], part.get("call"), part.get("launched")) for part in flow]
        assert marks == [(0, None, True), (1, None, None), (0, True, None)]
