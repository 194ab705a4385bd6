"""Requests that no page sends: one line as the answer, never a traceback."""

import json

import pytest

from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages.page_list import PAGES
from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
from ddltrace.dashboard.workspace import Workspace

UPDATE = "/_dash-update-component"
ESCAPES = "\x1b]0;owned\x07\x1b[31m"

FORGED = [
    *(None, True, -1, 0, 1, 2**31, 2**63, -(2**64), 10**400, 1.5, 1e308, float("nan")),
    *("", "x", "0", ESCAPES, "\ud800", "?trace=99&step=-1&a=x&b=1&experiment=7", "x" * 100_000),
    *([], [None], [1], [10**30, -5], [0, 2**63 - 1], ["x", {}], [[[]]]),
    *({}, {"rank": 0}, {"rank": 99, "event": 2**62}, {"rank": -1, "event": -1}),
    *({"rank": "x", "event": []}, {"rank": 0, "event": 10**9}, {"name": {}, "combine": []}),
]
VALUES = {
    "pathname": "/timeline",
    "search": "?trace=0",
    "trace": 0,
    "n_clicks": 1,
    "n_intervals": 1,
    "data": "dark",
    "selected": {"rank": 0, "row": 0, "event": 0},
    "range": [0, 1000],
}
"""Values of a page by property; others are null."""

KEYS = {"trace": 0, "rank": 0, "event": 0, "version": "x", "name": "ddp", "combine": 0, "key": "k"}
"""Values of the keys of an id."""

IDS = [
    *("", "url", "{", "{}.x", '{"trace":0,"type":"reload"}', '{"trace":"x","type":"reload"}'),
    *('{"event":0,"rank":0,"type":"goto"}', '{"event":[],"rank":null,"type":"goto"}'),
    *('{"combine":0,"name":"x","type":"run-add"}', '{"type":"refresh","version":[1]}', "[[[[1]]]]"),
]


@pytest.fixture
def client(workspace, tmp_path):
    traces = [opened.trace for opened in workspace.traces]
    allowed = Workspace(traces, (), AllowedRuns(tmp_path / "runs"))
    return create_app(allowed).server.test_client()


@pytest.fixture
def callbacks(client):
    """What Dash tells pages of the callbacks that this server answers."""
    return [one for one in client.get("/_dash-dependencies").json if not one["clientside_function"]]


def outputs_of(output):
    """The list of outputs in a request, from their text."""
    parts = output.strip(".").split("...") if output.startswith("..") else [output]
    pairs = [part.rsplit(".", 1) for part in parts]
    found = [{"id": id_of(name), "property": key.partition("@")[0]} for name, key in pairs]
    return found if output.startswith("..") else found[0]


def id_of(text):
    return json.loads(text) if text.startswith("{") else text


def slot(one, value):
    """An input or state with a value; a pattern stands for one component."""
    name = id_of(one["id"])
    if isinstance(name, dict):
        name = {key: KEYS.get(key, part) for key, part in name.items()}
        value = name if one["property"] == "id" else value
    filled = {"id": name, "property": one["property"], "value": value}
    return [filled] if "ALL" in one["id"] else filled


def text_of(filled):
    """How a request names the property that triggered it."""
    one = filled[0] if isinstance(filled, list) else filled
    name = one["id"]
    if isinstance(name, dict):
        name = json.dumps(name, separators=(",", ":"), sort_keys=True)
    return f"{name}.{one['property']}"


def request_of(callback, forged=(), value=None):
    """A request of the right form: the values of a page, but for some slots."""
    inputs = [slot(one, VALUES.get(one["property"])) for one in callback["inputs"]]
    state = [slot(one, VALUES.get(one["property"])) for one in callback["state"]]
    for number in forged:
        filled = [*inputs, *state][number]
        (filled[0] if isinstance(filled, list) else filled)["value"] = value
    return {
        "output": callback["output"],
        "outputs": outputs_of(callback["output"]),
        "inputs": inputs,
        "state": state,
        "changedPropIds": [text_of(inputs[0])],
    }


def is_one_line(answer):
    text = answer.get_data(as_text=True)
    if answer.status_code in (200, 204):
        return True
    return answer.status_code == 400 and text.count("\n") == 1 and len(text) < 300


def check(client, capfd, body, what):
    answer = client.post(UPDATE, json=body)
    assert is_one_line(answer), (what, answer.status_code, answer.get_data(as_text=True)[:300])
    shown = capfd.readouterr()
    assert shown.out + shown.err == "", what
    return answer.status_code


def test_values_of_callbacks(client, callbacks, capfd):
    assert len(callbacks) > 15
    accepted = set()
    for callback in callbacks:
        slots = len(callback["inputs"]) + len(callback["state"])
        for value in FORGED:
            for forged in (*((number,) for number in range(slots)), range(slots)):
                body = request_of(callback, forged, value)
                what = (callback["output"], list(forged), value)
                if check(client, capfd, body, what) in (200, 204):
                    accepted.add(callback["output"])
    # Some forged value is one that a page could send: the requests reach the callbacks.
    assert len(accepted) == len(callbacks)


def test_ids_that_trigger_callbacks(client, callbacks, capfd):
    for callback in callbacks:
        for name in IDS:
            body = request_of(callback) | {"changedPropIds": [f"{name}.n_clicks"]}
            check(client, capfd, body, (callback["output"], name))


@pytest.mark.parametrize("page", [page.path for page in PAGES])
def test_addresses_of_pages(client, capfd, page):
    callback = {
        "output": "..page.children...nav.children..",
        "inputs": [{"id": "url", "property": "pathname"}, {"id": "url", "property": "search"}],
        "state": [],
    }
    for key in ("trace", "step", "a", "b", "experiment", "sort", "order", "op", "rank", "q", "job"):
        for value in ("-1", "999999999", "x", "%00%1b%5b31m", "%ff"):
            body = request_of(callback)
            body["inputs"][0]["value"] = page
            body["inputs"][1]["value"] = f"?{key}={value}"
            check(client, capfd, body, (page, key, value))


def test_keys_of_requests(client, callbacks, capfd):
    for callback in callbacks:
        whole = request_of(callback)
        for key in whole:
            check(client, capfd, {k: v for k, v in whole.items() if k != key}, key)
            for value in (None, 7, "x", [], {}, [[]], [{}], {"id": []}, [{"id": {}, "x": 1}]):
                check(client, capfd, whole | {key: value}, (callback["output"], key, value))
    for body in (1, "x", [], [[]], {}, {"output": "nothing.children"}, {"output": ESCAPES}):
        check(client, capfd, body, body)
