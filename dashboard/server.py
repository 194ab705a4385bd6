"""Serves the dashboard until interrupted."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.owner_access import make_private_folder, user_folder

if TYPE_CHECKING:
    from ddltrace.dashboard.access import WsgiApp

FIRST_PORT: Final = 8050
_PORTS_TRIED: Final = 50
_BACKLOG: Final = 64


def bind(host: str, port: int | None) -> socket.socket:
    """Opens a listening socket.

    Args:
        host: Name or address of the interface.
        port: The port; None for the first free one, starting at `FIRST_PORT`.

    Raises:
        UsageError: The host is not this machine's, or the port is taken or not allowed.
    """
    ports = [port] if port is not None else range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED)
    for candidate in ports:
        try:
            return _listen(host, candidate)
        except socket.gaierror as error:
            raise UsageError(f"--host {host}: {error.strerror}") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            raise UsageError(_bind_failure(host, candidate, error)) from error
    raise UsageError(
        f"ports {ports[0]} to {ports[-1]} of {host} are all taken; choose one with --port"
    )


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken; leave --port out to take a free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one from 1024 on"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def url_of(server: socket.socket) -> str:
    """The address at which a browser on this machine reaches a socket."""
    host, port = server.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


@contextmanager
def running(app: WsgiApp, listening: socket.socket) -> Iterator[str]:
    """Serves in the background for the duration of the context.

    Args:
        app: The WSGI application.
        listening: A listening socket, see `bind`; it is closed at the end.

    Yields:
        The address.
    """
    from ddltrace.dashboard.http_server import HttpServer

    with closing(listening):
        server = HttpServer(listening, app)
        thread = threading.Thread(target=server.serve_forever, name="dashboard", daemon=True)
        thread.start()
        try:
            yield url_of(listening)
        finally:
            server.shutdown()
            thread.join()


def serve(listening: socket.socket, start: Callable[[str], WsgiApp]) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        listening: A listening socket, see `bind`. The system keeps requests until there is an app.
        start: Makes the WSGI application, given the address.
    """
    with (
        closing(listening),
        closing(_StopSignals()) as signals,
        running(start(url_of(listening)), listening),
    ):
        signals.wait()


class _StopSignals:
    """SIGINT and SIGTERM, from the creation of the object to its `close`. For the main thread.

    The interpreter's C handler writes each signal to a socket. A lock or a queue would not do: the
    main thread that waits for one is not woken up if the system delivers the signal to another
    thread, or just before the wait begins.
    """

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._sending.fileno())
        # Without a handler in Python, nothing is written.
        self._former = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def wait(self) -> None:
        """Waits for one of the signals; others that the process handles are skipped."""
        while self._receiving.recv(1)[0] not in self._former:
            pass

    def close(self) -> None:
        """Restores the former handlers."""
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._receiving.close()
        self._sending.close()


def open_browser(url: str) -> None:
    """Opens a graphical browser if there is one; a text browser would occupy the terminal.

    All users can read the command line of a browser, and the address contains a token. So the
    browser gets a file of this user that leads to the address.
    """
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return
    try:
        webbrowser.open(_leading_to(url).as_uri())
    except (webbrowser.Error, OSError) as error:
        raise DdltraceError(f"no browser could be opened ({error}); open {url}") from error


def _leading_to(url: str) -> Path:
    """A file that only this user can read and that leads a browser to an address.

    Raises:
        OSError: The user's cache cannot be written.
    """
    folder = user_folder()
    make_private_folder(folder)
    handle, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)
    atexit.register(Path(name).unlink, missing_ok=True)
    with os.fdopen(handle, "w") as file:
        file.write(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={url}">\n')
    return Path(name)
