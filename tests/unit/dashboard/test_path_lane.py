"""The lane of the critical paths, against the paths that the analyzer found."""

import json

import numpy as np
import pytest
from plotly.utils import PlotlyJSONEncoder

from ddltrace.analyzer.events.event_columns import NULL
from ddltrace.analyzer.events.rank_timeline import CATEGORIES, CATEGORY
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages.path_panel import describe_piece
from ddltrace.dashboard.pages.timeline_page import piece_panel, place
from ddltrace.dashboard.timeline.path_lane import NO_RANK, build_path_lane
from ddltrace.dashboard.timeline.tracks import Role, Timeline


def path_of(*pieces):
    """A path of (start, end, rank, category, name)."""
    start, end, rank, category, name = zip(*pieces, strict=True)
    assert start[1:] == end[:-1]
    columns = {"edge": (*start, end[-1]), "rank": rank, "name": name}
    columns["category"] = [CATEGORY[word] for word in category]
    columns["message"] = [NULL] * len(start)
    arrays = {key: np.array(values, dtype=np.int64) for key, values in columns.items()}
    return Path(**arrays, names=["conv", "fc"])


def test_the_pieces_are_those_of_the_paths(opened):
    lane = opened.path_lane
    pieces = [piece for step in lane.steps for piece in opened.analyzed.paths[step]]
    (row,) = lane.rows
    assert row.event.tolist() == list(range(len(pieces)))
    names = opened.timeline.names
    origin = opened.trace.origin_ns
    ends = row.index.end(np.arange(len(pieces)))
    for i, piece in enumerate(pieces):
        assert (row.index.start[i] + origin, ends[i] + origin) == (piece.start_ns, piece.end_ns)
        assert Role(row.role[i]).name == piece.category.upper()
        assert names[row.name[i]] == f"rank {piece.rank}: {piece.name or piece.category}"
    totals = {
        category: int((ends - row.index.start)[row.role == Role[category.upper()]].sum())
        for category in CATEGORIES
    }
    for category, total in totals.items():
        paths = opened.analyzed.paths.values()
        assert total == sum(path.totals_ns()[category] for path in paths)


def test_steps_that_overlap_stand_in_rows_of_their_own():
    paths = {
        0: path_of((1000, 1060, 0, "compute", 0), (1060, 1100, 1, "wait", NULL)),
        1: path_of((1090, 1150, 0, "compute", 1), (1150, 1200, 0, "idle", NULL)),
        2: path_of((1200, 1300, 1, "update", NULL)),
    }
    timeline = Timeline()
    lane = build_path_lane(paths, timeline, origin_ns=1000)
    assert [row.event.tolist() for row in lane.rows] == [[0, 1, 4], [2, 3]]
    assert lane.rows[1].index.start.tolist() == [90, 150]
    assert [timeline.names[name] for name in lane.rows[0].name] == [
        "rank 0: conv",
        "rank 1: wait",
        "rank 1: update",
    ]
    assert [lane.piece(number)[0] for number in range(5)] == [0, 0, 1, 1, 2]
    for number in (-1, 5):
        with pytest.raises(ValueError, match="5 pieces"):
            lane.piece(number)


def test_every_piece_leads_to_an_event_of_its_rank_around_it(opened):
    lane = opened.path_lane
    kinds = set()
    for number in range(int(lane.first[-1])):
        _, _, piece = lane.piece(number)
        details = describe_piece(opened, number)
        assert details.rank == piece.rank
        event = opened.trace.events(piece.rank).slice(details.event, 1).to_pylist()[0]
        kinds.add((piece.category, event["kind"]))
        assert event["start_ns"] < piece.end_ns
        assert event["end_ns"] > piece.start_ns
        shown, flow = piece_panel(opened, number)
        assert json.dumps(details.title)[1:-1] in json.dumps(shown, cls=PlotlyJSONEncoder)
        assert flow[0]["row"] == lane.first_row
        assert flow[0] == place(opened, NO_RANK, number) | {"last": False}
        assert {part["rank"] for part in flow[1:]} >= {piece.rank}
    assert {("compute", "layer"), ("compute", "phase"), ("transfer", "message")} <= kinds


def test_the_lane_is_served_after_the_rows_of_the_timeline(workspace, opened):
    client = create_app(workspace).server.test_client()
    assert client.get("/api/0/layout").get_json()["path"] is True
    reported = client.get("/api/0/path").get_json()
    assert (reported["row"], reported["rows"]) == (len(opened.timeline.rows), 1)
    assert {"compute", "transfer"} <= set(reported["used"])
    url = f"/api/0/frame?t0=0&t1={opened.timeline.span_ns}&px=1000&rows={reported['row']}"
    assert client.get(url + "&q=conv").status_code == 200
    beyond = client.get(f"/api/0/frame?t0=0&t1=100&px=10&rows={reported['row'] + 1}")
    assert beyond.status_code == 400
    first = client.get(f"/api/0/neighbor?row={reported['row']}&event=0&direction=1").get_json()
    assert first["event"] == 1
