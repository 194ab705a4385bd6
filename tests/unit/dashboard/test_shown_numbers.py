"""Numbers that pages show more than once, or as parts of a sum."""

import pytest

from ddltrace.analyzer.trace.opened_trace import open_trace
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.pages.critical_path_page import critical_path_page
from ddltrace.dashboard.workspace import Workspace

MANY = 120
UNITS = {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6}


def text_of(component):
    """All text of a page, in reading order."""
    if component is None or isinstance(component, str | int | float):
        return [] if component is None else [str(component)]
    if isinstance(component, list | tuple):
        return [text for item in component for text in text_of(item)]
    return text_of(getattr(component, "children", None))


def tables_of(component):
    """Rows of cells of every table of a page, heads first."""
    if isinstance(component, list | tuple):
        return [found for item in component for found in tables_of(item)]
    if type(component).__name__ == "Table":
        return [[["".join(text_of(cell)) for cell in row.children] for row in part_rows(component)]]
    return tables_of(component.children) if getattr(component, "children", None) else []


def part_rows(table):
    for part in table.children:
        yield from part.children if isinstance(part.children, list) else [part.children]


def microseconds(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def many_layers(_, rows):
    """The forward pass as more layers than a report has parts."""
    for row in [row for row in rows if row["kind"] == "layer"]:
        rows.remove(row)
        width = (row["end_ns"] - row["start_ns"]) // MANY
        for number in range(MANY):
            start = row["start_ns"] + number * width
            changes = {
                "start_ns": start,
                "end_ns": start + width,
                "name": f"{row['name']}.{number}",
            }
            rows.append(row | changes)
    return rows


def test_categories_and_ranks_of_the_critical_path_sum_to_the_step(write_run_of):
    opened = Workspace([open_trace(write_run_of("layers", change=many_layers))]).get(0)
    analysis = opened.analysis
    step = analysis.summary.step_us.mean
    assert sum(part.us for part in analysis.critical_path) < 0.95 * step  # it is cut off
    assert sum(row.us for row in analysis.critical_path_by_rank) == pytest.approx(step)
    (rows,) = [
        rows
        for rows in tables_of(critical_path_page(opened, Address()))
        if rows[0][:2] == ["category", "all ranks"]
    ]
    shown = [[microseconds(cell) for cell in cells[1:]] for cells in rows[1:]]
    assert sum(cells[0] for cells in shown) == pytest.approx(step, rel=0.005)
    for whole, *ranks in shown:
        assert sum(ranks) == pytest.approx(whole, rel=0.005)
