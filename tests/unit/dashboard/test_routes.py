"""The timeline's routes, and what the server refuses."""

import numpy as np
import pytest
from support.frames import decode_frame
from werkzeug.test import Client

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.access import Access
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.workspace import Workspace

MS = 1_000_000


@pytest.fixture
def client(workspace):
    return create_app(workspace).server.test_client()


def served(workspace, *, loopback):
    """A client of a server without a token."""
    return Client(Access(None, loopback=loopback).guard(create_app(workspace).server))


def test_layout_tells_tracks_and_roles(client):
    layout = client.get("/api/0/layout").get_json()
    assert layout["ranks"] == [0, 1]
    assert layout["events"] == 2 * (4 * 13 + 2)
    assert layout["tracks"][0]["kind"] == "steps"
    assert "unfinished" in layout["used"]
    assert "kernel" not in layout["used"]


def test_progress_is_told_of_pages_without_a_trace_too(client):
    nothing = {"reading": None, "measuring": None}
    assert client.get("/api/0/progress").get_json() == nothing
    assert client.get("/api/9/progress").get_json() == nothing


def test_a_frame_holds_the_events_of_its_window(client, opened):
    rows = len(opened.timeline.rows)
    body = client.get(f"/api/0/frame?t0=0&t1={405 * MS}&px=4000&rows=0-{rows - 1}").data
    frame = decode_frame(body)
    assert (frame["t0"], frame["t1"], frame["pixels"]) == (0, 405 * MS, 4000)
    total = sum(len(row.index) for row in opened.timeline.rows)
    assert frame["count"].sum() == total
    for number in range(rows):
        mine = frame["row"] == number
        row = opened.timeline.rows[number].index
        assert frame["start"][mine].tolist() == row.start.tolist()
        assert frame["end"][mine].tolist() == row.end(np.arange(len(row))).tolist()


def test_coarse_frames_have_one_interval_per_pixel(client, opened):
    rows = len(opened.timeline.rows)
    frame = decode_frame(client.get(f"/api/0/frame?t0=0&t1={405 * MS}&px=5&rows=0-{rows - 1}").data)
    assert np.bincount(frame["row"]).max() <= 6
    assert frame["count"].sum() == sum(len(row.index) for row in opened.timeline.rows)


def test_searching_adds_a_layer_with_what_matches(client, opened):
    rows = len(opened.timeline.rows)
    url = f"/api/0/frame?t0=0&t1={405 * MS}&px=4000&rows=0-{rows - 1}&q=FC.weight"
    frame = decode_frame(client.get(url).data)
    found = frame["match"] == 1
    # Per rank and step: one gradient and the message that carries it.
    assert found.sum() == 2 * 4 * 2
    answer = client.get("/api/0/search?q=FC.weight").get_json()
    assert answer["total"] == 16
    assert [hit["start"] for hit in answer["hits"]] == sorted(h["start"] for h in answer["hits"])


def test_searching_for_a_step(client):
    answer = client.get("/api/0/search?q=step 2").get_json()
    assert [(hit["rank"], hit["start"]) for hit in answer["hits"]] == [
        (0, 200 * MS),
        (1, 200 * MS),
    ]


def test_neighbors(client, opened):
    row = opened.timeline.rows[1]
    url = f"/api/0/neighbor?row=1&event={row.event[1]}&direction="
    assert client.get(url + "1").get_json()["event"] == row.event[2]
    assert client.get(url + "-1").get_json()["event"] == row.event[0]
    first = f"/api/0/neighbor?row=1&event={row.event[0]}&direction=-1"
    assert client.get(first).get_json() is None


def test_minimap_shows_how_busy_ranks_are(client):
    shares = client.get("/api/0/minimap?px=81").get_json()
    assert shares["ranks"] == [0, 1]
    assert len(shares["compute"][0]) == 81
    assert shares["communication"][0][0] == 0  # the first 5 ms fetch data
    assert max(shares["communication"][0]) == 255


def test_names_are_fit_to_be_shown(client, opened):
    names = client.get(
        "/api/0/names?ids=" + ",".join(map(str, range(len(opened.timeline.names))))
    ).get_json()
    hostile = next(name for name in names.values() if "img" in name)
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile


@pytest.mark.parametrize(
    "query",
    [
        "",
        "t0=0&t1=100&px=10",
        "t0=a&t1=100&px=10&rows=0",
        "t0=0&t1=1e9&px=10&rows=0",
        "t0=100&t1=100&px=10&rows=0",
        "t0=100&t1=0&px=10&rows=0",
        "t0=0&t1=99999999999999999999&px=10&rows=0",
        "t0=0&t1=9999999999999999999999999999&px=10&rows=0",
        "t0=-9999999999999999999&t1=100&px=10&rows=0",
        "t0=0&t1=100&px=0&rows=0",
        "t0=0&t1=100&px=-5&rows=0",
        "t0=0&t1=100&px=1000000000&rows=0",
        "t0=0&t1=100&px=10&rows=",
        "t0=0&t1=100&px=10&rows=9999",
        "t0=0&t1=100&px=10&rows=-1",
        "t0=0&t1=100&px=10&rows=3-1",
        "t0=0&t1=100&px=10&rows=0-99999999",
        "t0=0&t1=100&px=10&rows=0,x",
        "t0=0&t1=100&px=10&rows=0&q=" + "x" * 201,
        "t0=\u0661&t1=100&px=10&rows=\u0660",
    ],
)
def test_bad_frames_are_refused_with_a_reason(client, query):
    answer = client.get("/api/0/frame?" + query)
    assert answer.status_code == 400
    assert "\n" not in answer.get_json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "minimap?px=x",
        "minimap?px=0",
        "minimap",
        "names?ids=",
        "names?ids=1,a",
        "names?ids=99999999",
        "names?ids=" + ",".join(["1"] * 1001),
        "search?q=",
        "search?q=%20",
        "neighbor?row=0&event=0&direction=2",
        "neighbor?row=9999&event=0&direction=1",
        "neighbor?row=0&event=99999&direction=1",
        "neighbor?row=0&direction=1",
    ],
)
def test_other_bad_requests_are_refused_with_a_reason(client, path):
    answer = client.get("/api/0/" + path)
    assert answer.status_code == 400
    assert answer.get_json()["error"]


@pytest.mark.parametrize("number", ["1", "-1", "x", "99999999999999999999999", "%00"])
def test_unknown_traces_are_not_found(client, number):
    assert client.get(f"/api/{number}/layout").status_code == 404


def test_one_nanosecond_is_a_window(client):
    assert (
        decode_frame(client.get("/api/0/frame?t0=5&t1=6&px=1000&rows=0").data)["count"].sum() == 1
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8050", 200),
        ("localhost:8050", 200),
        ("LOCALHOST", 200),
        ("[::1]:8050", 200),
        ("attacker.example:8050", 403),
        ("127.0.0.1.attacker.example", 403),
        ("localhost.attacker.example", 403),
        ("192.168.0.7:8050", 403),
        ("", 403),
    ],
)
def test_requests_that_name_another_host_are_refused(workspace, host, status):
    client = served(workspace, loopback=True)
    for path in ("/", "/api/0/layout", "/_dash-layout"):
        assert client.get(path, headers={"Host": host}).status_code == status


def test_beyond_this_machine_any_host_may_be_named(workspace):
    client = served(workspace, loopback=False)
    assert client.get("/api/0/layout", headers={"Host": "gpu-box:8050"}).status_code == 200


def test_pages_load_nothing_from_elsewhere(client):
    page = client.get("/")
    text = page.get_data(as_text=True)
    assert "https://" not in text
    assert "http://" not in text
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]


def test_what_is_lost_is_told_with_the_layout(trace_path):
    damaged = next(trace_path.glob("rank-00000-*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:2000])
    workspace = Workspace([open_trace(trace_path)])
    layout = create_app(workspace).server.test_client().get("/api/0/layout").get_json()
    assert {t["rank"] for t in layout["tracks"]} == {1}
    assert any("rank 0" in note for note in layout["notes"])


def test_a_trace_without_events_has_an_empty_layout(tmp_path):
    from ddltrace.tracer.trace.run_files import write_run
    from ddltrace.tracer.trace.run_info import RunInfo

    (tmp_path / "nothing").mkdir()
    write_run(tmp_path / "nothing", RunInfo(status="complete"))
    workspace = Workspace([open_trace(tmp_path / "nothing")])
    client = create_app(workspace).server.test_client()
    layout = client.get("/api/0/layout").get_json()
    assert (layout["tracks"], layout["events"], layout["used"]) == ([], 0, [])
