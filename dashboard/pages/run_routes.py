"""The HTTP routes that start and cancel experiments, and their checks."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ddltrace.dashboard.access import host_of, is_loopback
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    from flask import Flask

    from ddltrace.dashboard.workspace import Workspace

START_PATH: Final = "/api/run/start"
CANCEL_PATH: Final = "/api/run/cancel"
TOKEN_HEADER: Final = "X-Ddltrace-Token"
_MAX_BODY: Final = 64_000
_NOT_ALLOWED: Final = (
    "start the dashboard with --allow-run to run experiments from the page",
    403,
)


def add_run_routes(server: Flask, workspace: Workspace) -> None:
    """Adds both routes; without the workspace's permission, they reject every request.

    Args:
        server: The WSGI application.
        workspace: Holds the permission, and receives started experiments.
    """
    from flask import jsonify, request

    runs = workspace.runs

    def refusal() -> tuple[str, int] | None:
        if runs is None:
            return _NOT_ALLOWED
        return _refusal(dict(request.headers), runs.token, request.content_length)

    def start() -> Any:
        refused = refusal()
        if refused is not None or runs is None:
            return _answer(*(refused or _NOT_ALLOWED))
        values = request.get_json(silent=True)
        if not isinstance(values, dict):
            return _answer("the request is not a JSON object", 400)
        from ddltrace.dashboard.runs.run_control import RunInProgressError
        from ddltrace.dashboard.runs.run_request import confirmation, read_request, shown_words

        commands = {one.number: one.trace.run.command or () for one in workspace.traces}
        try:
            wanted = read_request(values, commands)
            agreed = confirmation(wanted.command)
            if wanted.command and values.get("confirmed") != agreed:
                return _answer(
                    "this command comes from a trace: look at it first",
                    428,
                    command=shown_words(wanted.command),
                    confirm=agreed,
                )
            directory = runs.control.start(wanted.arguments())
        except RunInProgressError as error:
            return _answer(str(error), 409)
        except DdltraceError as error:
            return _answer(str(error), 400)
        number = workspace.add_experiment(directory)
        return jsonify({"experiment": number, "directory": str(directory)})

    def cancel() -> Any:
        refused = refusal()
        if refused is not None or runs is None:
            return _answer(*(refused or _NOT_ALLOWED))
        return jsonify({"cancelled": runs.control.cancel()})

    server.add_url_rule(START_PATH, "run_start", start, methods=["POST"])
    server.add_url_rule(CANCEL_PATH, "run_cancel", cancel, methods=["POST"])


def _refusal(headers: dict[str, str], token: str, length: int | None) -> tuple[str, int] | None:
    """The reason for rejecting a request, with its status; None if it is allowed."""
    headers = {name.lower(): value for name, value in headers.items()}
    host, origin = headers.get("host", ""), headers.get("origin")
    given = headers.get(TOKEN_HEADER.lower(), "")
    kind = headers.get("content-type", "").partition(";")[0].strip()
    checks = (
        (is_loopback(host_of(host)), "experiments are started from this machine only", 403),
        (
            origin is None or urlsplit(origin).netloc.lower() == host.lower(),
            "the request comes from another origin",
            403,
        ),
        (
            headers.get("sec-fetch-site", "same-origin") == "same-origin",
            "the request comes from another site",
            403,
        ),
        (
            hmac.compare_digest(given.encode(), token.encode()),
            "the page belongs to an earlier server: reload it",
            403,
        ),
        (kind == "application/json", "the request must be JSON", 415),
        (length is not None and length <= _MAX_BODY, "the request is too long", 413),
    )
    return next(((reason, status) for holds, reason, status in checks if not holds), None)


def _answer(message: str, status: int, **more: object) -> Any:
    from flask import jsonify

    response = jsonify({"error": message} | more)
    response.status_code = status
    return response
