"""Who gets anything from a dashboard: real processes, asked over real connections."""

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

import pytest
from flask import Flask
from werkzeug.test import Client

from ddltrace.dashboard.access import Access
from ddltrace.dashboard.errors import MAX_BODY
from ddltrace.dashboard.http_server import MAX_STRANGERS
from ddltrace.dashboard.server import bind, open_browser, running

PATHS = (
    *("/", "/timeline", "/sql?q=SELECT+1", "/live", "/nothing", "/assets/timeline.js"),
    *("/api/0/layout", "/api/0/frame", "/api/9/notes", "/_dash-layout", "/_dash-dependencies"),
    *("/_dash-component-suites/plotly/package_data/plotly.min.js", "/static/x", "/_reload-hash"),
)
BODY = '{"output":"page.children","outputs":[],"inputs":[],"changedPropIds":[]}'


@contextlib.contextmanager
def dashboard(trace, *options):
    """A dashboard in a process of its own: its printed line and process."""
    command = [sys.executable, "-m", "ddltrace", "dashboard", str(trace), "--no-browser", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.stdout.readline(), process
        finally:
            process.terminate()
            process.wait(60)


class Dashboard:
    """The address of a dashboard, and requests to it."""

    def __init__(self, line, process):
        self.url = re.fullmatch(r"Dashboard: (http://\S+)  \(Ctrl-C ends it\)\n", line)[1]
        self.process = process
        parts = urllib.parse.urlsplit(self.url)
        self.port = parts.port
        self.token = urllib.parse.parse_qs(parts.query).get("token", [None])[0]

    def ask(self, path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in headers)
            given = {"Content-Type": "application/json"} | headers
            if body is not None:
                given["Content-Length"] = str(len(body))
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders(body and body.encode())
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode(errors="replace")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    from unit.dashboard.conftest import rank_events, write_trace

    path = write_trace(tmp_path_factory.mktemp("of") / "run", {0: rank_events(0)})
    with dashboard(path) as (line, process):
        yield Dashboard(line, process)


def guesses(shown):
    """Requests of someone who does not know the token: the query, and headers."""
    wrong = shown.token[:-1] + ("x" if shown.token[-1] != "x" else "y")
    yield "", {}
    for guess in ("", wrong, shown.token[:-1], shown.token + "x", "None", "%00", "%ff", "é"):
        yield f"token={urllib.parse.quote(guess, safe='%')}", {}
    for value in ("", wrong, "é".encode().decode("latin-1"), '"', ";;;=", "\\"):
        yield "", {"Cookie": f"ddltrace-{shown.port}={value}"}
    yield "", {"Cookie": f"token={shown.token}; ddltrace={shown.token}"}
    yield "", {"Authorization": f"Bearer {shown.token[1:]}"}


def test_strangers_get_one_line_of_everything(shown):
    for path in PATHS:
        for query, headers in guesses(shown):
            joined = f"{path}{'&' if '?' in path else '?'}{query}" if query else path
            status, _, text = shown.ask(joined, **headers)
            assert (status, text.count("\n")) == (403, 1), (joined, headers, text)
            assert "run" not in text
    for path in ("/_dash-update-component", "/api/run/start", "/api/run/cancel", "/"):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, text = shown.ask(path, method, BODY)
            assert (status, text.count("\n")) == (403, 1)
            assert "Allow" not in headers
            assert headers["Server"] == "ddltrace"
    assert shown.ask("/", "HEAD")[0] == 403


def test_the_printed_address_opens_everything(shown):
    with urllib.request.urlopen(shown.url) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert b"/assets/timeline.js" in answer.read()
    assert cookie.split("; ")[1:] == ["Path=/", "HttpOnly", "SameSite=Strict"]
    pair = cookie.partition(";")[0]
    for path in ("/", "/api/0/layout", "/_dash-layout", "/assets/timeline.js"):
        status, headers, _ = shown.ask(path, Cookie=f"other=1; {pair}; ddltrace-1=x")
        assert (status, headers["Set-Cookie"]) == (200, None)
        assert shown.ask(f"{path}?token={shown.token}")[0] == 200
    assert shown.ask("/", Cookie=pair, Host="attacker.example")[0] == 403


def test_without_a_token_everyone_is_let_in(trace_path):
    with dashboard(trace_path, "--no-token") as (line, process):
        shown = Dashboard(line, process)
        assert shown.url == f"http://127.0.0.1:{shown.port}/"
        status, headers, _ = shown.ask("/api/0/layout")
        assert (status, headers["Set-Cookie"]) == (200, None)
        process.terminate()
        assert "every user of this machine can read the traces" in process.stderr.read()


def test_other_hosts_are_warned_of_and_need_the_token(trace_path):
    with dashboard(trace_path, "--host", "0.0.0.0") as (line, process):
        shown = Dashboard(line, process)
        assert shown.ask("/api/0/layout", Host="gpu-box")[0] == 403
        assert shown.ask(f"/api/0/layout?token={shown.token}", Host="gpu-box")[0] == 200
        process.terminate()
        assert "everyone who has the address below can read the traces" in process.stderr.read()


def test_two_dashboards_of_a_machine_have_different_cookies_and_tokens():
    access = Access("secret", loopback=True)
    environ = {"QUERY_STRING": "token=secret", "HTTP_HOST": "127.0.0.1:8050"}
    sent = []
    server = access.guard(lambda _, start_response: start_response("200 OK", []))
    server(environ, lambda status, headers: sent.extend(headers))
    [(_, cookie)] = sent
    assert cookie.startswith("ddltrace-8050=secret;")
    back = {"QUERY_STRING": "", "HTTP_COOKIE": cookie.partition(";")[0]}
    assert access.refusal(back | {"HTTP_HOST": "127.0.0.1:8050"}) is None
    assert access.refusal(back | {"HTTP_HOST": "127.0.0.1:8051"}) is not None


def test_a_browser_is_not_given_the_token_on_its_command_line(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", opened.append)
    open_browser("http://127.0.0.1:1/?token=secret")
    [file] = tmp_path.rglob("*.html")
    assert opened == [file.as_uri()]
    assert "secret" not in file.name
    assert file.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:1/?token=secret" in file.read_text()


ESCAPES = "%1b]0;owned%07%1b[31m%9b"


def test_nothing_of_a_request_reaches_the_terminal_raw(trace_path):
    with dashboard(trace_path) as (line, process):
        shown = Dashboard(line, process)
        key = f"?token={shown.token}"
        for path in (
            f"/{ESCAPES}",
            f"/assets/{ESCAPES}",
            f"/assets/..%2f..%2f{ESCAPES}",
            f"/api/{ESCAPES}/layout",
            f"/api/0/{ESCAPES}",
            f"/api/99999999999999999999/progress{ESCAPES}",
            f"/_dash-component-suites/{ESCAPES}/x.js",
            f"/_dash-component-suites/dash/{ESCAPES}.js",
            "/_dash-component-suites/dash/%00.js",
            f"/_{ESCAPES}",
        ):
            for method in ("GET", "POST", "PUT"):
                for query in (key, ""):
                    status, _, text = shown.ask(path + query, method, BODY)
                    assert status < 500, (path, text)
                    assert status == 200 or text.count("\n") == 1
                    assert "\x1b" not in text
        for raw in (b"\x1b[31m\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", shown.port), timeout=60) as stranger:
                stranger.sendall(raw)
                assert re.search(rb"(400|505) [^\x1b\n]+\n\Z", stranger.makefile("rb").read())
        process.terminate()
        assert process.stderr.read().replace("port 8050 is taken", "").count("\n") <= 1


def test_large_bodies_are_refused_and_not_held(shown):
    def peak():
        with open(f"/proc/{shown.process.pid}/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])

    # The app is there, and has answered a callback, before its memory is measured.
    update = f"/_dash-update-component?token={shown.token}"
    assert shown.ask(f"/api/0/layout?token={shown.token}")[0] == 200
    assert shown.ask(update, "POST", BODY)[0] == 400
    before = peak()
    for path in ("/_dash-update-component", "/api/run/start", "/"):
        for token in ("", f"?token={shown.token}"):
            status = 0
            with contextlib.suppress(ConnectionError):  # a server may cut such a request off
                status = shown.ask(path + token, "POST", " " * 100 * MAX_BODY)[0]
            assert status in (0, 403, 405, 413), path
    assert shown.ask(update, "POST", " ")[0] == 400
    assert peak() - before < 60_000  # kB


def test_strangers_who_wait_keep_no_one_out(shown):
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", shown.port)))
            for _ in range(3 * MAX_STRANGERS)
        ]
        for one in idle:
            with contextlib.suppress(ConnectionError):
                one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX:")
        assert shown.ask(f"/api/0/layout?token={shown.token}")[0] == 200
        files = len(os.listdir(f"/proc/{shown.process.pid}/fd"))
        assert files < 2 * MAX_STRANGERS


def test_strangers_who_send_slowly_are_cut_off(monkeypatch):
    monkeypatch.setattr("ddltrace.dashboard.http_server.PATIENCE_S", 0.3)
    app = Access("secret", loopback=True).guard(Flask("server"))
    with running(app, bind("127.0.0.1", None)) as url:
        port = urllib.parse.urlsplit(url).port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
            ended = threading.Thread(target=slow.recv, args=(1,))
            ended.start()
            with contextlib.suppress(ConnectionError):
                while ended.is_alive():
                    slow.sendall(b"G")
                    ended.join(0.02)
            ended.join()


def test_a_slow_reader_keeps_no_one_out(shown):
    path = "/_dash-component-suites/plotly/package_data/plotly.min.js"
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", shown.port))
            slow.sendall(
                f"GET {path}?token={shown.token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            assert slow.recv(1) == b"H"
        status, _, text = shown.ask(f"{path}?token={shown.token}")
        assert (status, len(text) > 1_000_000) == (200, True)


def test_the_app_sees_only_requests_with_the_token():
    seen = []

    def app(environ, start_response):
        seen.append(environ["PATH_INFO"])
        start_response("204 No Content", [])
        return []

    client = Client(Access("secret", loopback=True).guard(app))
    assert client.get("/a").status_code == 403
    assert client.get("/b?token=secret").status_code == 204
    assert client.get("/c").status_code == 204  # with the cookie
    assert seen == ["/b", "/c"]
