"""What the times of messages were read from: in the analysis, its JSON, its notes and in SQL."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from support.made_trace import made_trace

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.importers.imported import coded_list
from ddltrace.analyzer.report.notes import notes_of
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.trace.schema import CLOCKS, EVENTS


def with_clocks(*clocks: str | None) -> Trace:
    """The made trace with these clocks of its messages, in turn."""
    trace = made_trace()
    tables = {}
    for info in trace.run.ranks:
        table = trace.events(info.rank)
        turns = itertools.cycle(clocks)
        kinds = table["kind"].to_pylist()
        values = [next(turns) if kind == "message" else None for kind in kinds]
        place = EVENTS.get_field_index("clock")
        column = coded_list("clock", values)
        tables[info.segment] = table.set_column(place, EVENTS.field("clock"), column)
    return Trace(Path("made-by-hand"), trace.run, tables)


def test_messages_are_counted_by_clock() -> None:
    analysis = analyze_in_full(with_clocks("gloo", "polling", None, "graph")).analysis
    for row in analysis.ranks:
        counts = dataclasses.asdict(row.clocks)
        assert list(counts) == list(CLOCKS)
        assert {name: count for name, count in counts.items() if count} == {
            "gloo": 1,
            "polling": 1,
            "graph": 1,
        }
    notes = notes_of(analysis)
    assert any(
        note.startswith("the ends of 2 of 8 messages were found by polling") for note in notes
    )
    assert any(note.startswith("2 of 8 messages ran in replays") for note in notes)


def test_exact_times_and_imported_ones_need_no_note() -> None:
    for clock in ("gloo", None):
        notes = notes_of(analyze_in_full(with_clocks(clock)).analysis)
        assert not any("polling" in note or "replays" in note for note in notes)
