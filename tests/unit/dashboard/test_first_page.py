"""The page and its scripts from an earlier start, until the app is there."""

import json
import os
import re
import threading

import pytest
from werkzeug.test import Client

from ddltrace.dashboard.access import Access
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.first_page import keep_first_page, load_first_page
from ddltrace.dashboard.starting import StartingApp

PATHS = ("/", "/timeline")
TOKEN = re.compile(r'"end_id":"[^"]*"')
SCRIPT = re.compile(r'(?:src|href)="(/(?:assets|_dash-component-suites)/[^"]+)"')


@pytest.fixture
def app(workspace):
    return create_app(workspace).server


@pytest.fixture
def note(app, tmp_path):
    path = tmp_path / "note.json"
    keep_first_page(app, PATHS, path)
    return path


def early(note):
    starting = StartingApp(load_first_page(note), Access(None, loopback=True))
    return starting, Client(starting)


@pytest.mark.parametrize("path", PATHS)
def test_the_page_is_the_same_but_for_the_address_of_plotly(app, note, path):
    _, client = early(note)
    answer, expected = client.get(path), app.test_client().get(path)
    text = re.sub(r'<html data-plotly="[^"]+"', "<html", answer.text)
    assert TOKEN.sub("", text) == TOKEN.sub("", expected.text)
    assert answer.headers["Content-Security-Policy"] == expected.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_all_scripts_are_the_same_and_a_browser_may_keep_them(app, note):
    _, client = early(note)
    page = client.get("/").text
    scripts = [*SCRIPT.findall(page), re.search(r'data-plotly="([^"]+)"', page).group(1)]
    assert len(scripts) > 20
    for script in scripts:
        answer, expected = client.get(script), app.test_client().get(script)
        assert answer.data == expected.data, script
        assert answer.content_type == expected.content_type
        assert "max-age=31536000" in answer.headers["Cache-Control"]


def test_all_else_waits_for_the_app(app, note):
    starting, _ = early(note)
    wanted = [("GET", "/_dash-layout", "localhost")]
    wanted += [("POST", "/", "localhost"), ("GET", "/assets/none.js", "localhost")]
    answers = {}

    def ask(method, path, host):
        client = Client(starting)
        answers[method, path, host] = client.open(path, method=method, headers={"Host": host})

    threads = [threading.Thread(target=ask, args=each) for each in wanted]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    assert answers == {}
    starting.complete(app.wsgi_app)
    for thread in threads:
        thread.join()
    assert [answers[each].status_code for each in wanted] == [200, 405, 404]
    assert starting.first_path in {path for _, path, _ in wanted}


def test_without_an_app_what_waits_is_refused(note):
    starting, client = early(note)
    starting.complete(None)
    assert client.get("/").status_code == 503


def test_a_note_counts_only_as_long_as_its_sources_are_unchanged(note, tmp_path):
    noted = json.loads(note.read_text())
    assert load_first_page(note) is not None
    script = tmp_path / "script.js"
    script.write_text("1")
    status = script.stat()
    noted["sources"][str(script)] = [status.st_size, status.st_mtime_ns]
    note.write_text(json.dumps(noted))
    assert load_first_page(note) is not None
    script.write_text("2")
    os.utime(script, ns=(0, status.st_mtime_ns + 1))
    assert load_first_page(note) is None
    script.unlink()
    assert load_first_page(note) is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"format": 1, "sources": []}', "\x00"])
def test_a_damaged_note_does_not_count(tmp_path, damage):
    path = tmp_path / "note.json"
    path.write_text(damage)
    assert load_first_page(path) is None


def test_a_note_that_others_can_write_does_not_count(note):
    note.chmod(0o666)
    assert load_first_page(note) is None
    assert load_first_page(note.with_name("none")) is None


def test_a_cache_that_cannot_be_written_is_no_error(app, tmp_path):
    (tmp_path / "file").write_text("")
    keep_first_page(app, PATHS, tmp_path / "file" / "note.json")
