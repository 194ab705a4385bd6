"""Starting experiments from the page: what is refused, and what is started with which arguments."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages.run_form import with_technique
from ddltrace.dashboard.pages.run_routes import CANCEL_PATH, START_PATH, TOKEN_HEADER
from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
from ddltrace.dashboard.runs.run_control import RunControl, results_folder
from ddltrace.dashboard.runs.run_request import confirmation, read_request, shown_words
from ddltrace.dashboard.server import bind, running
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.errors import UsageError

REQUEST = {"strategies": "ddp\nwfbp", "job": "workload:gpt", "steps": 12, "warmup": 2}


def post(url, body, **headers):
    """The status and the answer of a POST; a header that is None is left out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} | headers
    given = {name: value for name, value in given.items() if value is not None}
    request = urllib.request.Request(url, data=data, headers=given, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture
def served(trace_path, tmp_path):
    runs = AllowedRuns(tmp_path / "results")
    workspace = Workspace([open_trace(trace_path)], (), runs)
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        yield url.rstrip("/"), runs
        assert runs.control.state() is None  # nothing was started
        assert not runs.control.folder.exists()


@pytest.mark.parametrize("path", [START_PATH, CANCEL_PATH])
def test_what_is_refused(served, path):
    url, runs = served
    token = {TOKEN_HEADER: runs.token}
    for status, says, headers in (
        (403, "another origin", token | {"Origin": "http://evil.example"}),
        (403, "another origin", token | {"Origin": "null"}),
        (403, "another origin", token | {"Origin": "http://127.0.0.1:1"}),
        (403, "another site", token | {"Sec-Fetch-Site": "cross-site"}),
        (403, "another site", token | {"Sec-Fetch-Site": "same-site"}),
        (403, "reload it", {}),
        (403, "reload it", {TOKEN_HEADER: "guess"}),
        (415, "must be JSON", token | {"Content-Type": "text/plain"}),
    ):
        answer = post(url + path, REQUEST, **headers)
        assert answer[0] == status, headers
        assert says in answer[1]["error"]
    assert post(url + path, b"[" + b" " * 70_000, **token)[0] == 413
    assert post(url + path, REQUEST, **token, Host="evil.example")[0] == 403


def test_nothing_is_started_without_the_switch(trace_path):
    workspace = Workspace([open_trace(trace_path)])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        for path in (START_PATH, CANCEL_PATH):
            status, answer = post(url.rstrip("/") + path, REQUEST)
            assert status == 403
            assert "--allow-run" in answer["error"]


def experiments_page_of(url, headers=MappingProxyType({})):
    """What the server sends for the experiments page."""
    body = {
        "output": "..page.children...nav.children..",
        "outputs": [
            {"id": "page", "property": "children"},
            {"id": "nav", "property": "children"},
        ],
        "inputs": [
            {"id": "url", "property": "pathname", "value": "/experiments"},
            {"id": "url", "property": "search", "value": ""},
        ],
        "changedPropIds": [],
    }
    status, answer = post(url + "/_dash-update-component", body, **headers)
    assert status == 200
    return json.dumps(answer)


def test_the_token_stands_in_the_page(served):
    url, runs = served
    assert runs.token in experiments_page_of(url)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_server_ends_the_run(trace_path, tmp_path, how):
    command = [sys.executable, "-m", "ddltrace", "dashboard", "--no-browser", "--allow-run"]
    with subprocess.Popen(
        [*command, str(trace_path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as server:
        url, _, key = server.stdout.readline().split()[1].partition("/?token=")
        cookie = {"Cookie": f"ddltrace-{url.rpartition(':')[2]}={key}"}
        token = re.search(r'"id": "run-token", "data": "([^"]+)"', experiments_page_of(url, cookie))
        status, answer = post(url + START_PATH, REQUEST, **{TOKEN_HEADER: token[1]}, **cookie)
        assert (status, answer["experiment"]) == (200, 0)
        directory = Path(answer["directory"])
        assert directory.parent == tmp_path / "experiments"
        while not (below := psutil.Process(server.pid).children(recursive=True)):
            pass
        while not (directory / "results.json").is_file():
            assert server.poll() is None
        below += psutil.Process(server.pid).children(recursive=True)
        server.send_signal(how)
        assert server.wait(60) == (-how if how == signal.SIGKILL else 0)
    assert psutil.wait_procs(below, timeout=60)[1] == []
    assert json.loads((directory / "results.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "would let others start programs"),
        (["--no-token"], "would let every user of this machine start programs as you"),
    ],
)
def test_a_run_needs_a_loopback_address_and_the_token(trace_path, options, says):
    command = [sys.executable, "-m", "ddltrace", "dashboard", "--no-browser", "--allow-run"]
    ended = subprocess.run(
        [*command, *options, str(trace_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert says in ended.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategies": ""}, "at least one"),
        ({"strategies": ["ddp"]}, "one strategy per line"),
        ({"strategies": "nonsense"}, "there is no 'nonsense'"),
        ({"strategies": "ddp; rm -rf /"}, "there is no"),
        ({"strategies": "ddp\nddp"}, "given twice"),
        ({"job": "workload:none"}, "no job"),
        ({"job": "trace:7"}, "no job"),
        ({"job": "trace:0", "ranks": 2}, "leave ranks empty"),
        ({"job": ["sh"]}, "must be a text"),
        ({"ranks": 1}, "from 2 to 64"),
        ({"ranks": "2; reboot"}, "whole number"),
        ({"ranks": True}, "whole number"),
        ({"steps": 5, "warmup": 5}, "leave nothing"),
        ({"hosts": 2}, "belong together"),
        ({"hosts": 2, "bandwidth": "fast"}, "not a rate"),
        ({"hosts": 2, "ranks": 4, "bandwidth": "1gbit"}, "one rank each"),
    ],
)
def test_bad_fields_are_named(served, change, says):
    url, runs = served
    status, answer = post(url + START_PATH, REQUEST | change, **{TOKEN_HEADER: runs.token})
    assert status == 400
    assert says in answer["error"]
    assert "\n" not in answer["error"]


def test_a_command_of_a_trace_is_shown_whole_before_it_is_run(trace_path, tmp_path):
    long = "x" * 50_000 + "; rm -rf ~"
    command = [sys.executable, "-c", long, "\x1b[31m\u202e\u200b", r"\x1b", "a  b", "\n", ""]
    run = json.loads((trace_path / "run.json").read_text())
    (trace_path / "run.json").write_text(json.dumps(run | {"command": command}))
    runs = AllowedRuns(tmp_path / "results")
    workspace = Workspace([open_trace(trace_path)], (), runs)
    started = []
    runs.control.start = lambda arguments: started.append(arguments) or tmp_path
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as base:
        url = base.rstrip("/") + START_PATH
        body, token = REQUEST | {"job": "trace:0"}, {TOKEN_HEADER: runs.token}
        status, answer = post(url, body, **token)
        assert (status, started) == (428, [])
        assert answer["command"] == [
            *(sys.executable, "-c", f"'{long}'", r"'\x1b[31m\u202e\u200b'", r"'\\x1b'"),
            *("'a  b'", r"'\n'", "''"),
        ]
        for agreed in (None, "", True, answer["confirm"][:-1], confirmation(command[:-1])):
            assert post(url, body | {"confirmed": agreed}, **token)[0] == 428
        assert post(url, body | {"confirmed": answer["confirm"]}, **token)[0] == 200
    assert started[0][-len(command) :] == command


def test_no_two_words_look_the_same():
    parts = ("", " ", "a", "'", '"', "\\", "n", "\n", "\x1b", "\u202e", "\xa0", "x1b", "\ud800")
    words = {a + b + c for a in parts for b in parts for c in parts}
    shown = shown_words(sorted(words))
    assert len(set(shown)) == len(words)
    assert all(word.isprintable() for word in shown)


def test_arguments_are_a_list_with_one_item_each():
    wanted = read_request(REQUEST | {"strategies": "topk:density=0.01 + feedback\nddp"}, {})
    assert wanted.arguments() == [
        "--strategy=topk:density=0.01+feedback",
        "--strategy=ddp",
        "--steps=12",
        "--warmup=2",
        "--repeats=3",
        "--workload=gpt",
    ]
    command = [sys.executable, "train.py", "--name", "a b; $(reboot)"]
    wanted = read_request(REQUEST | {"job": "trace:3"}, {3: command})
    assert wanted.arguments()[-5:] == ["--", *command]
    with pytest.raises(UsageError, match="no program"):
        read_request(REQUEST | {"job": "trace:0"}, {0: ["no-such-program"]})


def test_a_run_that_fails_says_so_and_keeps_its_log(tmp_path):
    control = RunControl(tmp_path / "results")
    directory = control.start(["--strategy=nonsense"])
    control._process.wait()
    state = control.state()
    assert (state.status, state.directory) == ("failed", directory)
    assert "there is no 'nonsense'" in state.log
    assert control.cancel() is False


def test_results_go_below_a_folder_of_traces_else_into_experiments(tmp_path, trace_path):
    assert results_folder([trace_path]).name == "experiments"
    assert results_folder([trace_path, tmp_path]) == tmp_path


def test_techniques_join_the_text():
    text = with_technique("ddp", "topk", [("density", "0.02"), ("x", "")], combine=False)
    assert text == "ddp\ntopk:density=0.02"
    assert with_technique(text, "feedback", [], combine=True) == "ddp\ntopk:density=0.02+feedback"
    assert with_technique(" \n", "wfbp", [], combine=True) == "wfbp"
