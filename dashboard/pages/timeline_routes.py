"""The HTTP routes that feed the timeline component; pages and details are Dash callbacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ddltrace.dashboard.timeline.counter_tracks import counter_tracks
from ddltrace.dashboard.timeline.frame import Window
from ddltrace.dashboard.workspace import NOTHING_UNDER_WAY
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from flask import Flask, Response

    from ddltrace.dashboard.workspace import OpenTrace, Workspace

_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,20}\Z")
_MAX_ROWS: Final = 512
_MAX_NAMES: Final = 1000
_MAX_QUERY: Final = 200


def add_routes(server: Flask, workspace: Workspace) -> None:
    """Adds the timeline's routes, all under ``/api/`` and read-only.

    Invalid requests get status 400, missing traces 404, both with ``{"error": one line}``.

    Args:
        server: The Flask application.
        workspace: The traces.
    """
    from flask import Response, jsonify, request

    def route(name: str, answer: Callable[[OpenTrace, dict[str, str]], Any]) -> None:
        def view(number: str) -> Response | tuple[Response, int]:
            try:
                opened = workspace.get(parse_int(number, "trace"))
            except (TraceError, ValueError) as error:
                return jsonify(error=str(error)), 404
            try:
                body = answer(opened, request.args.to_dict())
            except (TraceError, ValueError) as error:
                return jsonify(error=str(error)), 400
            if isinstance(body, bytes):
                return Response(body, mimetype="application/octet-stream")
            return jsonify(body)

        server.add_url_rule(f"/api/<number>/{name}", f"api_{name}", view)

    route("stages", lambda opened, _: opened.stages())
    route("layout", lambda opened, args: opened.layout(_stage(args)))
    route("path", lambda opened, _: opened.path_layout())
    route("notes", lambda opened, _: {"notes": opened.notes})
    route("counters", lambda opened, _: {"tracks": counter_tracks(opened.trace)})
    route("frame", _frame)
    route("names", _names)
    route("minimap", _minimap)
    route("search", _search)
    route("neighbor", _neighbor)

    # Pages ask for it while they load, also pages that show no trace.
    def progress(number: int) -> Response:
        known = number < len(workspace.traces)
        return jsonify(workspace.get(number).progress() if known else NOTHING_UNDER_WAY)

    server.add_url_rule("/api/<int:number>/progress", "api_progress", progress)


def parse_int(text: str | None, what: str) -> int:
    """Reads an integer of a request.

    Raises:
        ValueError: It is missing or not an integer.
    """
    if text is None or not _WHOLE_NUMBER.match(text):
        raise ValueError(f"{what} must be a whole number")
    return int(text)


def parse_rows(text: str | None) -> list[int]:
    """Reads row numbers as ``3,8-12``.

    Raises:
        ValueError: The text has another form, or more rows than a frame allows.
    """
    rows: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        low = parse_int(first, "rows")
        high = parse_int(last, "rows") if last else low
        if high < low or len(rows) + high - low >= _MAX_ROWS:
            raise ValueError(f"a frame has 1 to {_MAX_ROWS} rows")
        rows.extend(range(low, high + 1))
    return rows


def _stage(args: dict[str, str]) -> int | None:
    return parse_int(args["stage"], "stage") if "stage" in args else None


def _query(args: dict[str, str]) -> str:
    query = args.get("q", "")
    if len(query) > _MAX_QUERY:
        raise ValueError(f"a search has at most {_MAX_QUERY} characters")
    return query


def _frame(opened: OpenTrace, args: dict[str, str]) -> bytes:
    window = Window(
        start_ns=parse_int(args.get("t0"), "t0"),
        end_ns=parse_int(args.get("t1"), "t1"),
        pixels=parse_int(args.get("px"), "px"),
    )
    return opened.frame(window, parse_rows(args.get("rows")), _query(args), _stage(args))


def _names(opened: OpenTrace, args: dict[str, str]) -> dict[int, str]:
    parts = args.get("ids", "").split(",")
    if len(parts) > _MAX_NAMES:
        raise ValueError(f"at most {_MAX_NAMES} labels at once")
    return opened.names([parse_int(part, "ids") for part in parts], _stage(args))


def _minimap(opened: OpenTrace, args: dict[str, str]) -> dict[str, Any]:
    return opened.minimap(parse_int(args.get("px"), "px"), _stage(args))


def _search(opened: OpenTrace, args: dict[str, str]) -> dict[str, Any]:
    query = _query(args)
    if not query.strip():
        raise ValueError("q must be a text to search for")
    found = opened.search(query)
    return {"total": found.total, "hits": found.hits}


def _neighbor(opened: OpenTrace, args: dict[str, str]) -> dict[str, Any] | None:
    direction = parse_int(args.get("direction"), "direction")
    if direction not in (-1, 1):
        raise ValueError("direction must be -1 or 1")
    row, event = parse_int(args.get("row"), "row"), parse_int(args.get("event"), "event")
    return opened.neighbor(row, event, direction)
