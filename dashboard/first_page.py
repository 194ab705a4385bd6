"""Keeps the page and its scripts for the next start, so that a browser can load them at once.

Importing Dash takes longer than a browser needs for the page's scripts, which are the same in
every start. So a dashboard notes in the user's cache what it served: the text of the page, and
where the scripts lie. The next one answers with them while it imports Dash. The note counts only
as long as none of the files has changed from which the page and the scripts were made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.dashboard.stored.user_files import read_note, write_note
from ddltrace.tracer.owner_access import user_folder

if TYPE_CHECKING:
    from flask import Flask

FORMAT: Final = 1
_SCRIPTS: Final = re.compile(r'(?:src|href)="(/(?:assets|_dash-component-suites)/[^"]+)"')
_SUITES: Final = "/_dash-component-suites/"
_ASSETS: Final = "/assets/"
_PLOTLY: Final = f"{_SUITES}plotly/package_data/plotly.min.js"
_CACHED: Final = "private, max-age=31536000, immutable"
"""For the browser: the address of a script changes with its content."""

_MADE_OF: Final = ("ddltrace", "dash", "dash_ag_grid", "plotly")
"""Packages whose modules make the page."""


class Answer(NamedTuple):
    """A response: its headers and its body."""

    headers: list[tuple[str, str]]
    body: bytes


class FirstPage:
    """The page and the scripts of an earlier dashboard.

    Args:
        noted: The content of the note.
    """

    def __init__(self, noted: dict[str, Any]) -> None:
        self._paths = frozenset(noted["paths"])
        self._page: dict[str, Any] = noted["page"]
        self._files: dict[str, Any] = noted["files"]

    def answer(self, path: str, query: str) -> Answer | None:
        """The response to a GET request; None if the app has to answer it."""
        if path in self._paths:
            return _answer(self._page, self._page["text"].encode())
        file = self._files.get(f"{path}?{query}" if query else path)
        if file is None:
            return None
        try:
            return _answer(file, Path(file["file"]).read_bytes())
        except OSError:
            return None


def _answer(noted: dict[str, Any], body: bytes) -> Answer:
    headers = [(name, value) for name, value in noted["headers"]]
    return Answer([*headers, ("Content-Length", str(len(body)))], body)


def note_path(variant: str) -> Path:
    """The file of the note of this Python installation.

    Args:
        variant: Names the options that change the page.
    """
    installation = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return user_folder() / f"dashboard-page-{installation}-{variant}.json"


def load_first_page(path: Path) -> FirstPage | None:
    """Reads a note; None if there is none that counts."""
    try:
        noted = read_note(path)
        if noted["format"] != FORMAT or noted["sources"] != _versions(noted["sources"]):
            return None
        return FirstPage(noted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_first_page(app: Flask, paths: Iterable[str], path: Path) -> None:
    """Writes the note, if the user's cache can be written.

    Args:
        app: The app, which is asked for the page and the scripts.
        paths: The addresses of its pages.
        path: The file of the note.
    """
    client = app.test_client()
    page = client.get("/")
    urls = [*dict.fromkeys(_SCRIPTS.findall(page.text)), _PLOTLY]
    files = {}
    for url in urls:
        response, file = client.get(url), _file_of(app, url)
        # Whatever cannot be found on the disk waits for the app.
        if file is None or file.read_bytes() != response.data:
            continue
        version = f"?m={file.stat().st_mtime_ns}" if url == _PLOTLY else ""
        headers = [*_lasting(response.headers), ("Cache-Control", _CACHED)]
        files[url + version] = {"headers": headers, "file": str(file)}
    plotly = next((url for url in files if url.startswith(_PLOTLY)), "")
    noted = {
        "format": FORMAT,
        "paths": sorted(paths),
        "page": {
            "headers": [*_lasting(page.headers), ("Cache-Control", "no-store")],
            # `assets/plotly_ahead.js` reads the address. The text has a token of this server for
            # background callbacks, which the dashboard does not have.
            "text": page.text.replace("<html", f'<html data-plotly="{plotly}"', 1),
        },
        "files": files,
        "sources": _versions({str(each["file"]) for each in files.values()} | _module_files()),
    }
    write_note(path, noted)


def _lasting(headers: Any) -> list[tuple[str, str]]:
    """The headers of a response that hold for later ones as well: type and security."""
    return [
        (name, value)
        for name, value in headers.items()
        if name == "Content-Type"
        or name.startswith(("Content-Security", "X-", "Referrer", "Cross-"))
    ]


def _file_of(app: Flask, url: str) -> Path | None:
    """The file that is served at an address; None if it cannot be told."""
    from dash.fingerprint import check_fingerprint

    address = url.partition("?")[0]
    if address.startswith(_ASSETS):
        file = Path(app.root_path) / address.removeprefix("/")
    else:
        package, _, name = address.removeprefix(_SUITES).partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin).parent / check_fingerprint(name)[0]
    return file if file.is_file() else None


def _module_files() -> set[str]:
    """The files of the modules that make the page, and the folders of scripts."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _MADE_OF and getattr(module, "__file__", None)
    ]
    files = {str(module.__file__) for module in modules}
    return files | {str(Path(__file__).parent / "assets")}


def _versions(files: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of the last change of each file.

    Raises:
        OSError: A file is missing.
    """
    found = {}
    for file in files:
        status = os.stat(file)
        found[file] = [status.st_size, status.st_mtime_ns]
    return found
