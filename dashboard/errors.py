"""Errors of requests: one line as the answer, and nothing of the request raw on the terminal."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.formatting.units import escaped

if TYPE_CHECKING:
    from flask import Flask

MAX_BODY: Final = 1_000_000
"""Bytes of a request: the longest is a statement or a list of strategies."""

_OF_DASH: Final = "/_"
"""The routes of Dash. Its own errors are about requests that no page sends."""


def add_error_answers(server: Flask) -> None:
    """Answers errors with their status and one line, and limits the size of requests."""
    from dash.exceptions import InvalidResourceError
    from flask import Response, request
    from werkzeug.exceptions import BadRequest, HTTPException, InternalServerError

    server.config["MAX_CONTENT_LENGTH"] = MAX_BODY

    def answer(error: Exception) -> Any:
        if not isinstance(error, HTTPException):
            if request.path.startswith(_OF_DASH):
                error = BadRequest("no page of this dashboard sends such a request")
            else:
                print_error()
                error = InternalServerError(f"an error in ddltrace, {type(error).__name__}")
        if error.code is None or error.code < 400:
            return error.get_response()
        line = " ".join((error.description or error.name).split())
        return Response(f"{line}\n", status=error.code, mimetype="text/plain")

    for kind in (Exception, InvalidResourceError):
        server.register_error_handler(kind, answer)


def print_error() -> None:
    """Prints the exception that is handled, for a report."""
    print_escaped(traceback.format_exc())


def print_escaped(text: str) -> None:
    """Prints lines to standard error, with control characters escaped."""
    sys.stderr.write("".join(f"{escaped(line)}\n" for line in text.splitlines()))
