"""The server: ports, addresses, and a clean end."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from ddltrace.dashboard.access import host_of, is_loopback
from ddltrace.dashboard.server import FIRST_PORT, bind, url_of
from ddltrace.tracer.errors import UsageError


def test_a_taken_port_is_an_error_that_names_the_fix():
    with bind("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} .* taken; leave --port out"):
            bind("127.0.0.1", port)


def test_without_a_port_the_next_free_one_is_taken():
    with bind("127.0.0.1", None) as first, bind("127.0.0.1", None) as second:
        ports = [s.getsockname()[1] for s in (first, second)]
    assert FIRST_PORT <= ports[0] < ports[1]


def test_a_host_that_is_not_ours():
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 8050)


def test_urls_are_what_a_browser_understands():
    with bind("127.0.0.1", None) as server:
        assert url_of(server) == f"http://127.0.0.1:{server.getsockname()[1]}/"
    with bind("0.0.0.0", None) as server:
        assert url_of(server).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("127.0.0.1:8050", "127.0.0.1"),
        ("[::1]:8050", "::1"),
        ("LocalHost", "localhost"),
        ("[::1", "::1"),
        ("", ""),
    ],
)
def test_host_headers(header, host):
    assert host_of(header) == host


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "192.168.1.2", "localhost.example", "::")))


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "ddltrace", "dashboard", "--no-browser", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_serves_and_ends_with_0(trace_path, number):
    with start(str(trace_path)) as process:
        line = process.stdout.readline()
        url = line.split()[1]
        with urllib.request.urlopen(url.replace("?", "api/0/layout?")) as answer:
            assert answer.status == 200
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest == ""
    assert "Traceback" not in errors


def test_a_signal_that_another_thread_receives_ends_the_server():
    """The system chooses the thread; the main thread waits meanwhile."""
    code = """
import signal, threading, time
from flask import Flask
from ddltrace.dashboard.server import bind, serve

def start(url):
    threading.Thread(target=receive, daemon=True).start()
    return Flask("server")

def receive():
    time.sleep(0.2)  # the main thread waits by then; if not, the test passes as well
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(600)

with bind("127.0.0.1", None) as listening:
    serve(listening, start)
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_the_command_names_what_is_wrong(tmp_path, trace_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with start(str(nothing)) as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert errors.startswith("ddltrace: ")
    assert errors.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with start(str(trace_path), "--port", port) as process:
            out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert f"port {port} of 127.0.0.1 is taken" in errors
