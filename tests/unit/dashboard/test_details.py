"""What is known of one event, on its rank and on the others."""

import pytest

from ddltrace.analyzer.formatting.units import instant_text
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.pages.event_details import describe
from ddltrace.dashboard.pages.timeline_page import event_panel, range_panel
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.errors import TraceError

MS = 1_000_000


def find(opened, rank, **wanted):
    for number, row in enumerate(opened.trace.events(rank).to_pylist()):
        if all(row[key] == value for key, value in wanted.items()):
            return number
    raise AssertionError(wanted)


def texts(component):
    """All text of a tree of components."""
    if isinstance(component, str):
        return [component]
    if isinstance(component, (list, tuple)):
        return [text for child in component for text in texts(child)]
    return texts(getattr(component, "children", None) or [])


def test_a_collective_is_found_on_every_rank(opened):
    details = describe(opened, 0, find(opened, 0, op="all_reduce", seq=3))
    early, late = details.parts
    assert (early.rank, late.rank) == (0, 1)
    assert early.arrival_ns == (100 + 51) * MS
    assert (early.wait_ns, early.transfer_ns, early.is_last) == (10 * MS, 17 * MS, False)
    assert (late.wait_ns, late.transfer_ns, late.is_last) == (0, 17 * MS, True)
    assert (early.lateness_ns, late.lateness_ns) == (-10 * MS, 10 * MS)
    assert [t.name for t in details.tensors] == ["net.conv.weight"]
    assert ("Host waited", "18.0 ms") in details.facts


def test_a_send_finds_its_receive(opened):
    details = describe(opened, 0, find(opened, 0, op="send"))
    assert [(part.rank, part.transfer_ns) for part in details.parts] == [(0, 3 * MS), (1, 3 * MS)]


def test_an_unfinished_message_says_so(opened):
    details = describe(opened, 1, find(opened, 1, status="open"))
    assert dict(details.facts)["Duration"] == "had not completed when last seen"
    assert [part.transfer_ns for part in details.parts] == [None, None]


def test_what_a_missing_member_did_to_a_message_is_not_guessed(write_run_of):
    def lose(rank, rows):
        return [row for row in rows if rank == 0 or row["op"] != "all_reduce" or row["seq"] != 3]

    opened = Workspace([open_trace(write_run_of("less", change=lose))]).get(0)
    number = find(opened, 0, op="all_reduce", seq=3)
    details = describe(opened, 0, number)
    assert details.missing_ranks == [1]
    (part,) = details.parts
    assert (part.wait_ns, part.transfer_ns, part.is_last) == (None, None, False)
    children, _ = event_panel(opened, 0, number)
    shown = texts(children)
    assert "27.0 ms" in shown  # from its arrival to its end
    assert "waiting and transfer together" in shown
    assert "Nothing is known of rank 1." in shown
    assert not any("arrived last" in text for text in shown)


def test_a_failed_message_has_no_transfer(write_run_of):
    def fail(rank, rows):
        failed = {"status": "failed"}
        return [row | failed if rank == 1 and row["seq"] == 3 else row for row in rows]

    opened = Workspace([open_trace(write_run_of("failed", change=fail))]).get(0)
    details = describe(opened, 0, find(opened, 0, op="all_reduce", seq=3))
    assert [(part.wait_ns, part.transfer_ns) for part in details.parts] == [
        (10 * MS, 17 * MS),
        (0, None),
    ]


@pytest.mark.parametrize(("rank", "event"), [(0, 10**9), (0, -1), (7, 0)])
def test_events_that_are_not_there(opened, rank, event):
    with pytest.raises(TraceError):
        describe(opened, rank, event)


def test_hostile_names_are_shown_without_their_power(opened):
    details = describe(opened, 0, find(opened, 0, kind="marker"))
    assert details.title.startswith("<img")  # shown as text: Dash sets text, never markup
    assert "\x1b" not in details.title
    assert "\u202e" not in details.title


def test_the_panel_leads_to_every_rank(opened):
    children, flow = event_panel(opened, 1, find(opened, 1, op="all_reduce", seq=0))
    assert [(f["rank"], f["last"]) for f in flow] == [(0, False), (1, True)]
    shown = " ".join(texts(children))
    assert "Rank 1 arrived last" in shown
    assert "net.fc.weight" in shown


def test_the_panel_of_a_range_tells_how_busy_ranks_are(opened):
    shown = texts(range_panel(opened, 0, 100 * MS))
    assert "100 ms" in shown
    row = shown.index("rank 0")
    assert shown[row + 1 : row + 3] == ["67.0 %", "37.0 %"]


@pytest.mark.parametrize(
    ("us", "says"),
    [
        (2_348_377.4, "2.348377 s"),
        (4_000_000_000.0, "4,000.000000 s"),
        (12_345.678, "12.346 ms"),
        (1.234, "1.234 µs"),
        (0.5, "500 ns"),
        (0.0, "0 ns"),
    ],
)
def test_instants_keep_their_microseconds(us, says):
    assert instant_text(us) == says


def test_two_instants_of_one_range_differ(opened):
    shown = texts(range_panel(opened, 200 * MS, 200 * MS + 2_000))
    assert shown[shown.index("From") + 1] == "200.000 ms"
    assert shown[shown.index("To") + 1] == "200.002 ms"


def test_a_message_and_a_search_need_no_rank_to_be_read_again(opened, monkeypatch):
    number = find(opened, 0, op="all_reduce", seq=3)
    before = describe(opened, 0, number)

    def read_again(self, rank):
        raise AssertionError(f"rank {rank} is read again")

    monkeypatch.setattr(type(opened.trace), "events", read_again)
    assert describe(opened, 0, number) == before
    assert opened.search("net.conv.weight").total > 0


def test_the_panel_of_a_gradient_shows_its_life_and_its_message(opened):
    details = describe(opened, 0, find(opened, 0, kind="gradient", step=1))
    facts = dict(details.facts)
    # rank 0: the gradient of net.fc is ready at 40 ms; its message starts at 41 and ends at 75.
    assert facts["Message"] == "all_reduce 2"
    assert facts["Message enqueued"].startswith("0")
    assert "1" in facts["Message in flight"]
    assert "35" in facts["Message complete"]
    assert [part.rank for part in details.parts] == [0, 1]
