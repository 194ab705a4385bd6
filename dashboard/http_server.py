"""The HTTP server of a dashboard: a thread for each connection, and limits for strangers."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from typing import Any, Final

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from ddltrace.dashboard.access import ADMIT, WsgiApp
from ddltrace.dashboard.errors import print_escaped

MAX_STRANGERS: Final = 64
"""Connections whose request has not been admitted yet; a new one beyond them ends the oldest."""

PATIENCE_S: Final = 10.0
"""How long such a connection lasts."""


class HttpServer(ThreadedWSGIServer):
    """Serves a WSGI application on a listening socket.

    A connection counts as a stranger's until the application calls the function at
    `ddltrace.dashboard.access.ADMIT`. Strangers can neither use up the process's threads and
    files, nor keep others out: whoever is admitted no longer counts.

    Args:
        listening: The socket. With the caller's socket: werkzeug exits the process when a port is
            taken.
        app: The application.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, app: WsgiApp) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__(host, port, app, handler=QuietHandler, fd=listening.fileno())
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # in the order in which they came

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands a new connection to a thread."""
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _cut(oldest)
            self._strangers[request] = time.monotonic() + PATIENCE_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that were not admitted in time; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection, deadline in self._strangers.items():
                if deadline < now:
                    _cut(connection)

    def admit(self, connection: socket.socket) -> None:
        """Takes a connection out of the limits."""
        with self._lock:
            self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is not reported; `log` logs errors of the application."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Prints an error of the application; the text can contain what a client sent."""
        print_escaped(message)


class QuietHandler(WSGIRequestHandler):
    """Handles a request without a line in the log."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    error_content_type = "text/plain"
    error_message_format = "%(code)d %(message)s\n"

    def make_environ(self) -> dict[str, Any]:
        """The WSGI environment."""
        try:
            environ = super().make_environ()
        except ValueError:  # such as an address with half a bracket
            self.send_error(400)
            raise ConnectionAbortedError from None
        return environ | {ADMIT: functools.partial(self.server.admit, self.connection)}

    def version_string(self) -> str:
        """The header ``Server``: without versions, which strangers need not know."""
        return "ddltrace"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Prints nothing about a request."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Prints nothing: the request line is the client's."""


def _cut(connection: socket.socket) -> None:
    """Ends a connection that another thread reads; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
