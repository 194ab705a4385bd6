"""Every nullable column may be null in any row: no report, query, export or page fails.

DDLTRACE_NULLS=500 runs that many generated traces instead of a few.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.compare.comparison import compare
from ddltrace.analyzer.exporters import FORMATS, export
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS
from ddltrace.analyzer.query.rows_as_text import rows_as_text
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.html_report import render as render_html
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.dashboard.pages.overview import FIGURES, overview_page
from ddltrace.dashboard.pages.timeline_page import event_panel, timeline_page
from ddltrace.dashboard.timeline.frame import Window
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.trace.schema import EVENTS

TRACES = int(os.environ.get("DDLTRACE_NULLS", "8"))
NULLABLE = [field.name for field in EVENTS if field.nullable]


def fill(built: Any, *, device: bool) -> None:
    """Four steps of two ranks with every kind of event and every column."""
    weight, bias = built.tensor("net.weight", 400), built.tensor("net.bias", 40)
    lane = "stream-7" if device else "comm/0"
    for rank in range(2):
        one = built[rank]
        for number in range(4):
            one.step, t = number, 100 * number
            one.add("data", t, t + 5, name="next batch", phase="data")
            one.add("phase", t + 5, t + 40, name="forward", phase="forward")
            one.add("layer", t + 10, t + 30, name="net", phase="forward")
            one.add("phase", t + 40, t + 90, name="backward", phase="backward")
            for tensor, ready in ((weight, t + 50), (bias, t + 60)):
                one.add("gradient", ready, ready, tensors=[tensor], phase="backward")
            sizes = {"bytes": 440, "out_bytes": 440, "wire_bytes": 900}
            one.message(
                *("all_reduce", t + 62, t + 80),
                **{"seq": 2 * number, "tensors": [weight, bias], "phase": "backward"},
                **{"lane": lane, "name": "bucket", **sizes},
            )
            op, column = ("send", "bytes") if rank == 0 else ("recv", "out_bytes")
            pair = one.message(op, t + 91, t + 94, seq=number, peer=1 - rank, tag=0, **{column: 64})
            one.wait(t + 91, t + 94, pair)
            one.add("wait", t + 70, t + 90, name="backward")
            one.add("codec", t + 62, t + 64, name="encode", tensors=[weight], bytes=440)
            one.add("kernel", t + 20, t + 28, name="gemm", lane="stream-9", enqueue_ns=t * 1000)
            one.add("copy", t + 1, t + 3, name="Memcpy HtoD", lane="stream-9", bytes=64)
            one.add("host", t + 6, t + 9, name="aten::mm")
            one.add("marker", t + 2, t + 4, name="mark")
            one.message(
                *("broadcast", t + 95, t + 97),
                **{"seq": 2 * number + 1, "peer": 0, "tensors": [bias], **sizes},
            )
            one.add("phase", t + 94, t + 99, name="optimizer", phase="optimizer")
            one.whole_step(number, t, t + 100)


def lose_values(built: Any, choice: random.Random) -> None:
    """Sets values to null: in some columns none, in some all, in others a share of the rows."""
    for one in built.ranks.values():
        for name in NULLABLE:
            share = choice.choice((0, 0, 0, 0.05, 0.3, 0.7, 1))
            kinds = choice.choice((None, None, "message", "gradient", "step", "wait"))
            for row in one.rows:
                if kinds in (None, row["kind"]) and choice.random() < share:
                    row[name] = None
                elif name == "tensors" and row.get(name) and choice.random() < share / 4:
                    row[name] = [None, *row[name]] if choice.random() < 0.5 else []


def implausible(value: Any, path: str = "") -> list[str]:
    """Numbers that a trace of 400 us cannot give: what stands for null, taken for a value."""
    if isinstance(value, dict):
        return [text for key, each in value.items() for text in implausible(each, f"{path}.{key}")]
    if isinstance(value, list):
        return [text for each in value for text in implausible(each, path)]
    name = path.rpartition(".")[2]
    if not isinstance(value, int | float) or name.endswith("_ns"):
        return []
    low = -1e5 if name.endswith("_us") else 0
    is_number = name.endswith(("_us", "bytes", "count", "messages", "bytes_sent", "seq"))
    return [f"{path} = {value}"] if is_number and not low <= value <= 1e6 else []


def use_everything(path: Path, folder: Path) -> None:
    """Runs all that reads a trace."""
    trace = open_trace(path)
    analysis = trace.analyze()
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    assert implausible(document) == []
    render_report(analysis)
    render_html(analyze_in_full(trace), trace)
    compare([analysis], [trace.analyze()])
    for table in ("events", *OF_ANALYSIS):
        rows = run_query(trace, f"SELECT * FROM {table}")
        assert implausible(rows.to_pylist()) == []
        for form in ("table", "csv", "json"):
            "".join(rows_as_text(rows, form))
    for form in FORMATS:
        target = folder / f"exported.{form}"
        export(trace, form, target, force=True)
        if form == "chrome":
            json.loads(target.read_bytes(), parse_constant=pytest.fail)
    use_dashboard(trace)


def use_dashboard(trace: Trace) -> None:
    opened = Workspace([trace]).get(0)
    overview_page(opened)
    timeline_page(opened)
    json.dumps(opened.layout(), allow_nan=False)
    json.dumps(opened.minimap(100), allow_nan=False)
    json.dumps(opened.path_layout(), allow_nan=False)
    for make in FIGURES.values():
        make(opened)
    rows = range(len(opened.timeline.rows))
    opened.frame(Window(0, max(opened.timeline.span_ns, 1), 300), list(rows), "net")
    for rank in trace.ranks:
        for event in range(0, trace.events(rank).num_rows, 7):
            event_panel(opened, rank, event)


@pytest.mark.parametrize("seed", range(TRACES))
@pytest.mark.long
def test_values_that_are_null_stop_nothing(build, tmp_path, seed):
    choice = random.Random(seed)
    built = build(2)
    fill(built, device=bool(seed % 2))
    lose_values(built, choice)
    try:
        use_everything(built.write(final=bool(choice.getrandbits(1))), tmp_path)
    except DdltraceError as error:
        pytest.fail(f"nothing in this trace is damaged, yet: {error}")


def test_a_tensor_whose_gradient_no_message_carries_has_no_bucket(build):
    built = build(2)
    weight = built.tensor("weight", 400)
    for rank in range(2):
        for number in range(3):
            built[rank].step, t = number, 100 * number
            built[rank].message("all_gather", t, t + 9, seq=number, bytes=200, tensors=[weight])
            built[rank].add("phase", t + 10, t + 90, name="backward", phase="backward")
            built[rank].add("gradient", t + 50, t + 50, tensors=[weight])
            built[rank].whole_step(number, t, t + 100)
    (row,) = built.trace().analyze().tensors
    assert (row.bucket, row.messages, row.ready_us) == (None, 1, 50)
